"""Numbers at their limits: exploded ratios, what is masked, nothing at all, and types of less than float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.algorithms import advantages, losses
from etude.algorithms.kl import kl
from etude.algorithms.masked import masked_mean, masked_sum, masked_whiten

TOKEN_LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo": losses.ppo_clip,
    "dual": lambda *a: losses.ppo_clip(*a, dual_clip=3.0),
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "importance": losses.importance_sampling,
    "dro": losses.dro,
    "gmpo": losses.gmpo,
    "sapo": losses.sapo,
    "k2": lambda new, old, _, mask: kl(new, old, "k2", mask_BT=mask),
    "k3": lambda new, old, _, mask: kl(new, old, "k3", mask_BT=mask),
    "value": lambda new, old, returns, mask: losses.value_loss(new, returns, mask, old_values_BT=old, clip=0.2),
}
FAR = st.floats(-1e4, 1e4, width=32)
LEFT_OUT = st.sampled_from([math.nan, math.inf, -math.inf])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(FAR, FAR, st.floats(-9, 9, width=32), st.booleans(), LEFT_OUT), min_size=1, max_size=6))
def test_losses_of_tokens_are_finite_however_far_and_whatever_is_masked(name: str, rows: list[Any]) -> None:
    mask = torch.tensor([[row[3] for row in rows]])
    new, old, advantage = (
        torch.where(mask, torch.tensor([[row[i] for row in rows]]), torch.tensor([[row[4] for row in rows]]))
        for i in range(3)
    )
    new.requires_grad_()
    found = TOKEN_LOSSES[name](new, old, advantage, mask)
    found.sum().backward()
    assert found.isfinite().all() and new.grad is not None and new.grad.isfinite().all()
    assert (found[~mask] == 0).all() and (new.grad[~mask] == 0).all()


PAIR_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dpo": lambda a, b: losses.dpo(a - b, label_smoothing=0.1),
    "robust": lambda a, b: losses.robust_dpo(a - b, noise=0.1),
    "hinge": lambda a, b: losses.hinge(a - b),
    "ipo": lambda a, b: losses.ipo(a - b),
    "apo_zero": losses.apo_zero,
    "apo_down": losses.apo_down,
    "simpo": losses.simpo,
    "orpo": lambda a, b: losses.orpo(-a.abs(), -b.abs()),
    "kto": lambda a, b: losses.kto(a, b > 0, b.abs()),
    "bradley_terry": lambda a, b: losses.bradley_terry(a, b, margin_P=b, center=0.01),
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
@settings(max_examples=30, deadline=None)
@given(pairs=st.lists(st.tuples(FAR, FAR), max_size=5))
def test_losses_of_pairs_are_finite_however_far(name: str, pairs: list[tuple[float, float]]) -> None:
    one = torch.tensor([a for a, _ in pairs], requires_grad=True)
    found = PAIR_LOSSES[name](one, torch.tensor([b for _, b in pairs]))
    found.sum().backward()
    assert found.shape == one.shape and found.isfinite().all()
    assert one.grad is not None and one.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.tuples(FAR, FAR), min_size=2, max_size=5), counts=st.booleans())
def test_divergences_of_distributions_are_finite_however_far(beta: float, rows: list[Any], counts: bool) -> None:
    student = torch.tensor([[[a for a, _ in rows]]], requires_grad=True)
    found = losses.generalised_jsd(student, torch.tensor([[[b for _, b in rows]]]), torch.tensor([[counts]]), beta=beta)
    found.sum().backward()
    assert found.isfinite().all() and (found >= -1e-4).all() and (counts or found.item() == 0)
    assert student.grad is not None and student.grad.isfinite().all()


def test_equal_rewards_give_zero_without_an_eps() -> None:
    rewards = torch.full((3,), 0.1)
    assert advantages.grpo(rewards, [0, 0, 0], eps=0.0).tolist() == [0.0] * 3
    assert masked_whiten(rewards, torch.ones(3), eps=0.0).tolist() == [0.0] * 3
    assert advantages.grpo(torch.tensor([1.0, -1.0]), [0, 0], eps=0.0).tolist() == pytest.approx(
        [0.5**0.5, -(0.5**0.5)]
    )


@pytest.mark.parametrize("far", [25.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage, dual", [(1.0, None), (-1.0, 3.0)])
def test_a_ratio_that_has_exploded_moves_nothing(far: float, advantage: float, dual: float | None) -> None:
    new, one = torch.tensor([[far]], requires_grad=True), torch.ones(1, 1)
    found = losses.ppo_clip(new, torch.zeros(1, 1), advantage * one, one, dual_clip=dual)
    found.backward()
    assert found.item() == pytest.approx(-1.2 if dual is None else 3.0)
    assert new.grad is not None and new.grad.item() == 0.0


def test_a_ratio_is_right_up_to_where_it_is_cut() -> None:
    new, one = torch.tensor([[19.0, -90.0]], dtype=torch.float64, requires_grad=True), torch.ones(1, 2)
    found = losses.importance_sampling(new, torch.zeros(1, 2), one.double(), one)
    found.sum().backward()
    assert found.tolist()[0] == pytest.approx([-math.exp(19), -math.exp(-90)])
    assert new.grad is not None and new.grad.tolist()[0] == pytest.approx([-math.exp(19), -math.exp(-90)])


def test_a_token_that_can_no_longer_be_chosen_weighs_nothing_in_cispo() -> None:
    new = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    found = losses.cispo(new, torch.tensor([[-2.0, -1.0]]), torch.ones(1, 2), torch.ones(1, 2))
    found.sum().backward()
    assert found.tolist() == [[0.0, 1.0]] and new.grad is not None and new.grad.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_sums_of_small_types_are_float32(kind: torch.dtype) -> None:
    ones, mask = torch.ones(1, 2501, dtype=kind), torch.ones(1, 2501)
    assert masked_sum(ones, mask).item() == 2501.0 and masked_sum(ones, mask, 1).dtype == torch.float32
    assert masked_mean(ones * 3, mask).item() == 3.0 and masked_whiten(ones, mask).dtype == torch.float32
    returns = advantages.discounted_returns(ones, mask, gamma=1.0)
    assert returns[0, 0].item() == 2501.0
    found, totals = advantages.gae(ones, torch.zeros_like(ones), mask, gamma=1.0, lam=1.0)
    assert found[0, 0].item() == totals[0, 0].item() == 2501.0
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=kind)
    assert advantages.grpo(rewards, [0, 0, 0], std="none").tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    for loss in TOKEN_LOSSES.values():
        assert loss(-ones, -2 * ones, ones, mask).dtype == torch.float32
    for pairs in (losses.dpo(ones[0]), losses.ipo(ones[0]), losses.cross_entropy(-ones, ones)):
        assert pairs.dtype == torch.float32


def test_whole_rewards_have_fractional_advantages() -> None:
    assert advantages.dr_grpo(torch.tensor([1, 0, 0]), [0, 0, 0]).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_what_follows_an_end_is_not_looked_at() -> None:
    rewards, done = torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 1]])
    found, _ = advantages.gae(
        rewards, torch.zeros(1, 2), torch.ones(1, 2), lam=1.0, done_BT=done, bootstrap_B=torch.tensor([math.nan])
    )
    assert found.tolist() == [[3.0, 2.0]]
