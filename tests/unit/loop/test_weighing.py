"""Whatever the split of a batch, losses add up to the same mean, and gradients get the same scale."""

from __future__ import annotations

import math

import pytest
import torch

from etude.loop.distributed import Group
from etude.loop.step import Meter
from etude.loop.weighing import Account

SHARES = [(2.0, 1), (6.0, 3), (1.0, 4)]
"""Total loss and weight of three micro-batches."""


def accounted(shares: list[tuple[float, float]], nominal: float | None = None) -> tuple[Account, list[float], Meter]:
    account, meter = Account(nominal, len(shares)), Meter()
    starts = [account.add(torch.tensor(total), 1, weight, {"worst": total}) for total, weight in shares]
    account.read(meter)
    return account, starts, meter


@pytest.mark.parametrize("nominal", [None, 1.0, 24.0])
def test_the_nominal_weight_is_divided_by_and_corrected_for(nominal: float | None) -> None:
    account, starts, meter = accounted(SHARES, nominal)
    assert account.mean == 9 / 8
    assert account.correction(world=1) * starts[0] == pytest.approx(1 / 8, rel=1e-15)
    assert account.correction(world=2) == 2 * account.correction(world=1)
    assert meter.read(Group()) == {"loss": 9 / 8, "worst": (2 * 1 + 6 * 3 + 1 * 4) / 8}


def test_equal_means_need_no_correction() -> None:
    account = Account(None, 2)
    starts = [account.add(torch.tensor(mean), 4, 4, {}) for mean in (1.0, 2.0)]
    account.read(Meter())
    assert (starts, account.correction(world=1), account.mean) == ([0.5, 0.5], 1.0, 1.5)


def test_nothing_that_counts_is_a_step_that_changes_nothing() -> None:
    account, _, meter = accounted([(0.0, 0.0)])
    assert account.is_finite
    assert (account.mean, account.correction(world=1), meter.read(Group())) == (0.0, 0.0, {})


@pytest.mark.parametrize(
    "bad, said", [((math.nan, 1.0), "loss is nan in"), ((1.0, math.inf), "weight of the loss is inf in")]
)
def test_the_micro_batch_at_fault_is_named(bad: tuple[float, float], said: str) -> None:
    account, _, _ = accounted([(1.0, 1.0), bad])
    assert not account.is_finite
    assert account.first_bad() == (1, f"{said} micro-batch 1")


def test_more_is_summed_with_them_and_the_loss_may_stay_out_of_the_meter() -> None:
    account, meter = Account(2.0, 1), Meter()
    account.add(torch.tensor(3.0), 1, 2, {"worst": 5.0})
    account.read(meter, loss_name=None)
    assert account.sum(Group(), [7.0]) == [7.0]
    assert meter.read(Group()) == {"worst": 5.0}
