"""DPO and IPO: pairs, their losses and gradients, and that learning widens the margin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import DPO, IPO
from etude.algorithms.preference import preference_pairs
from etude.errors import ConfigError, DataError
from etude.types import Batch
from tests.unit.algorithms.stand_in import Bigram, assert_close, gradients, moved, pairs, rollouts


def sums_by_hand(table: np.ndarray, batch: Batch, side: str) -> np.ndarray:
    ids, mask = batch[f"{side}_input_ids"].numpy(), batch[f"{side}_loss_mask"].numpy()
    normal = table - np.log(np.exp(table).sum(1, keepdims=True))
    return np.array(
        [sum(normal[row[t - 1], row[t]] for t in np.flatnonzero(m)) for row, m in zip(ids, mask, strict=True)]
    )


def loss_by_hand(table: np.ndarray, reference: np.ndarray, batch: Batch, kind: str, beta: float) -> np.ndarray:
    gain = {
        side: sums_by_hand(table, batch, side) - sums_by_hand(reference, batch, side) for side in ("chosen", "rejected")
    }
    h = gain["chosen"] - gain["rejected"]
    return np.log1p(np.exp(-beta * h)) if kind == "dpo" else (h - 1 / (2 * beta)) ** 2


@pytest.mark.parametrize("algorithm, kind", [(DPO(beta=0.3), "dpo"), (IPO(beta=0.3), "ipo")])
def test_loss_and_gradient_of_pairs(algorithm: Any, kind: str) -> None:
    policy, batch = moved(Bigram()), pairs()
    prepared = algorithm.prepare(policy, batch)
    with policy.reference() as frozen:
        reference = frozen.table.numpy()
    table = policy.table.detach().numpy()
    total, weight, found = gradients(algorithm, policy, prepared)
    assert weight == 3 and total == pytest.approx(loss_by_hand(table, reference, batch, kind, 0.3).sum(), abs=1e-9)
    step = 1e-6
    for at in [(1, 2), (2, 0), (2, 3), (4, 4), (5, 1), (3, 2)]:
        up, down = table.copy(), table.copy()
        up[at], down[at] = up[at] + step, down[at] - step
        slope = loss_by_hand(up, reference, batch, kind, 0.3) - loss_by_hand(down, reference, batch, kind, 0.3)
        assert found[0][at].item() == pytest.approx(slope.sum() / (2 * step), abs=1e-6)
    assert float(found[0].abs().sum()) > 0
    assert all(parameter.grad is None for parameter in policy.frozen.parameters())  # type: ignore[union-attr]


def test_metrics_say_how_often_and_how_much_the_chosen_is_preferred() -> None:
    policy, batch, algorithm = moved(Bigram()), pairs(), DPO(beta=0.5)
    with policy.reference() as frozen:
        reference = frozen.table.numpy()
    gains = [
        sums_by_hand(policy.table.detach().numpy(), batch, side) - sums_by_hand(reference, batch, side)
        for side in ("chosen", "rejected")
    ]
    metrics = algorithm.loss(policy, algorithm.prepare(policy, batch)).metrics
    assert float(metrics["accuracy"]) == pytest.approx((gains[0] > gains[1]).mean())
    assert float(metrics["margin"]) == pytest.approx(0.5 * (gains[0] - gains[1]).mean())
    assert float(metrics["chosen_reward"]) == pytest.approx(0.5 * gains[0].mean())


def test_means_over_tokens_do_not_see_length() -> None:
    policy, batch = Bigram(), pairs()
    algorithm = DPO(average_log_probs=True)
    found = algorithm.prepare(policy, batch)["chosen_ref_log_probs"].numpy()
    with policy.reference() as frozen:
        expected = sums_by_hand(frozen.table.numpy(), batch, "chosen") / batch["chosen_loss_mask"].sum(1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_reference_is_asked_once() -> None:
    policy, batch, algorithm = Bigram(), pairs(), DPO()
    prepared = algorithm.experience(policy, batch, rows=2)
    assert algorithm.prepare(None, prepared)["chosen_ref_log_probs"] is prepared["chosen_ref_log_probs"]
    assert_close(prepared["chosen_ref_log_probs"], algorithm.prepare(policy, batch)["chosen_ref_log_probs"])


def test_rollouts_become_pairs_of_best_and_worst() -> None:
    batch = rollouts(6, 3)
    batch.metadata["rewards"] = [1.0, 3.0, 2.0, 5.0, 5.0, 5.0]  # the second group prefers nothing
    made = preference_pairs(batch)
    assert len(made) == 1 and made["group_id"] == [0]
    assert torch.equal(made["chosen_input_ids"][0], batch["input_ids"][1])
    assert torch.equal(made["rejected_input_ids"][0], batch["input_ids"][0])
    assert made["chosen_rewards"] == [3.0] and made["rejected_rewards"] == [1.0]
    direct = DPO().experience(Bigram(), batch)
    assert torch.equal(direct["chosen_input_ids"], made["chosen_input_ids"]) and "chosen_ref_log_probs" in direct


def test_no_pair_is_no_loss() -> None:
    batch, policy = rollouts(4, 2), Bigram()
    batch.metadata["rewards"] = [1.0] * 4
    prepared = DPO().experience(policy, batch)
    loss = DPO().loss(policy, prepared)
    loss.total.backward()
    assert len(prepared) == 0 and loss.total.item() == float(loss.weight) == 0.0


@pytest.mark.parametrize("algorithm", [DPO(beta=0.5), IPO(beta=0.5)])
def test_learning_widens_the_margin(algorithm: Any) -> None:
    policy, batch = Bigram(), pairs(8)
    prepared = algorithm.prepare(policy, batch)
    first = float(algorithm.loss(policy, prepared).metrics["margin"])
    for _ in range(30):
        loss = algorithm.loss(policy, prepared)
        policy.zero_grad()
        (loss.total / loss.weight).backward()
        with torch.no_grad():
            policy.table -= 0.1 * policy.table.grad  # type: ignore[operator]
    metrics = algorithm.loss(policy, prepared).metrics
    assert float(metrics["margin"]) > first + 0.1 and float(metrics["accuracy"]) >= 0.75


def test_bad_parameters_and_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="beta must be positive"):
        DPO(beta=0.0)
    with pytest.raises(ConfigError, match="label_smoothing"):
        IPO(label_smoothing=0.7)
    with pytest.raises(ConfigError, match="IPO has no label_smoothing"):
        IPO(label_smoothing=0.1)
    with pytest.raises(DataError, match="rejected_input_ids"):
        batch = pairs()
        del batch.values["rejected_input_ids"]
        DPO().prepare(Bigram(), batch)
