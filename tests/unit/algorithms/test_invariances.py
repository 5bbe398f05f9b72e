"""What must not matter: padding, the order of rows, micro-batches, and the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms import (
    CISPO,
    DPO,
    DRO,
    GKD,
    GMPO,
    GRPO,
    GSPO,
    IPO,
    KTO,
    OPO,
    ORPO,
    PPO,
    RLOO,
    SAPO,
    SFT,
    Distillation,
    DrGRPO,
    ReinforcePlusPlus,
    ReMax,
    RewardModel,
    SimPO,
)  # fmt: skip
from etude.data.padding import padding_data
from etude.types import Batch
from tests.unit.algorithms.stand_in import Bigram, assert_close, gradients, labelled, moved, pairs, rollouts

ALGORITHMS: list[Any] = [
    GRPO(), GRPO(aggregation="token_mean", dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01),
    GRPO(aggregation="token_sum"),
    DrGRPO(), DrGRPO(length=16), GSPO(), CISPO(), DRO(), RLOO(), RLOO(kl_coef=0.1, kl_in="reward", kl_kind="k1"),
    GMPO(), SAPO(), GRPO(tis_cap=1.5), GRPO(overlong_length=4, overlong_buffer=2, drop_equal_groups=True),
    OPO(), ReMax(), ReinforcePlusPlus(), PPO(), SFT(), SFT(aggregation="sequence_mean"),
    Distillation(teacher=Bigram(5)), Distillation(teacher=Bigram(5), kind="full"),
    GKD(teacher=Bigram(5), on_policy=0.0), GKD(teacher=Bigram(5), beta=0.1, on_policy=0.0, aggregation="sequence_mean"),
]  # fmt: skip
NAMES = [f"{i}-{type(algorithm).__name__}" for i, algorithm in enumerate(ALGORITHMS)]


def experience(algorithm: Any, policy: Bigram, batch: Batch) -> Batch:
    prepare = getattr(algorithm, "prepare", None)
    return batch if prepare is None else prepare(policy, batch)


def assert_same(found: Any, expected: Any) -> None:
    """Compare totals, weights and gradients; sums in another order differ in the last digits of float64."""
    assert found[:2] == pytest.approx(expected[:2], rel=1e-9, abs=1e-9)
    for one, other in zip(found[2], expected[2], strict=True):
        assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), extra=st.integers(1, 5), left=st.booleans())
def test_more_padding_changes_nothing(algorithm: Any, seed: int, extra: int, left: bool) -> None:
    policy, batch = moved(Bigram()), rollouts(seed=seed)
    plain = gradients(algorithm, policy, experience(algorithm, policy, batch))
    width = batch["input_ids"].shape[1] + extra
    wide = padding_data(batch, width, pad_token_id=0, left_pad=left)  # token 0 precedes a text: the same prediction
    assert_same(gradients(algorithm, policy, experience(algorithm, policy, wide)), plain)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(6)))
def test_the_order_of_rows_changes_nothing(algorithm: Any, seed: int, order: list[int]) -> None:
    policy, batch = moved(Bigram()), rollouts(seed=seed)
    plain = gradients(algorithm, policy, experience(algorithm, policy, batch))
    turned = batch.reorder(order)
    assert_same(gradients(algorithm, policy, experience(algorithm, policy, turned)), plain)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), world=st.sampled_from([1, 2, 4]))
def test_micro_batches_and_ranks_change_nothing(algorithm: Any, seed: int, rows: int, world: int) -> None:
    """An experience cut into micro-batches on several ranks: summed totals, weights and gradients are the same."""
    policy, batch = moved(Bigram()), rollouts(seed=seed)
    whole = experience(algorithm, policy, batch)
    plain = gradients(algorithm, policy, whole)
    padded = whole.pad_to_world_size(world)
    share = len(padded) // world
    parts = [gradients(algorithm, policy, rank, parts=rows) for rank in padded.split(share)]
    summed = [sum(part[0] for part in parts), sum(part[1] for part in parts)]
    grads = [torch.stack(found).sum(0) for found in zip(*(part[2] for part in parts), strict=True)]
    assert_same((*summed, grads), plain)


@pytest.mark.parametrize("algorithm", ALGORITHMS[:17], ids=NAMES[:17])
def test_metrics_of_parts_average_to_those_of_the_whole(algorithm: Any) -> None:
    policy, batch = moved(Bigram()), rollouts()
    whole = experience(algorithm, policy, batch)
    expected = algorithm.loss(policy, whole)
    parts = [algorithm.loss(policy, part) for part in whole.split(2)]
    for name, value in expected.metrics.items():
        mean = sum(float(part.metrics[name]) * float(part.weight) for part in parts) / float(expected.weight)
        assert mean == pytest.approx(float(value), abs=1e-9), name


@pytest.mark.parametrize(
    "algorithm", [GRPO(), DrGRPO(), RLOO(), OPO(), ReinforcePlusPlus()], ids=lambda a: type(a).__name__
)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), shift=st.integers(-9, 9))
def test_a_shift_of_all_rewards_changes_nothing(algorithm: Any, seed: int, shift: int) -> None:
    batch = rollouts(seed=seed)
    plain = algorithm.advantages(batch).values["advantages"]
    batch.metadata["rewards"] = batch["rewards"] + shift
    assert_close(algorithm.advantages(batch).values["advantages"], plain, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=NAMES)
def test_rows_and_batches_without_anything_that_counts_are_harmless(algorithm: Any) -> None:
    policy, batch = moved(Bigram()), rollouts()
    batch.values["loss_mask"] = batch["loss_mask"] * torch.tensor([[1.0], [1], [1], [1], [1], [0]])
    total, weight, grads = gradients(algorithm, policy, experience(algorithm, policy, batch))
    assert weight > 0 and torch.tensor([total, *(g.sum() for g in grads)]).isfinite().all()
    batch.values["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    nothing = experience(algorithm, policy, batch)
    total, weight, grads = gradients(algorithm, policy, nothing)
    assert total == weight == 0.0 and all(g.abs().sum() == 0 for g in grads)
    assert all(float(value) == 0.0 for value in algorithm.loss(policy, nothing).metrics.values())


PAIRWISE: list[Any] = [
    DPO(), DPO(average_log_probs=True, label_smoothing=0.1), DPO(loss_type="robust", label_smoothing=0.1),
    DPO(loss_type="hinge"), DPO(loss_type="apo_zero"), DPO(loss_type="apo_down"), IPO(), SimPO(), ORPO(),
    RewardModel(center=0.1),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", PAIRWISE, ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), extra=st.integers(1, 4), order=st.permutations(range(3)))
def test_pairs_are_as_free_of_layout(algorithm: Any, seed: int, extra: int, order: list[int]) -> None:
    assert_free_of_layout(algorithm, pairs(seed=seed), "rejected", extra, order, world_size=2)


def assert_free_of_layout(
    algorithm: Any, batch: Any, widened: str, extra: int, order: list[int], world_size: int
) -> None:
    """Columns that begin with `widened` may be wider, rows in any order and padded to any world."""
    policy = moved(Bigram())
    plain = gradients(algorithm, policy, algorithm.prepare(policy, batch))
    wide = batch.copy()
    for name, value in batch.values.items():
        if name.startswith(widened):
            wide.values[name] = padding_data(value, value.shape[1] + extra)
    assert_same(gradients(algorithm, policy, algorithm.prepare(policy, wide.reorder(order))), plain)
    padded = algorithm.prepare(policy, batch).pad_to_world_size(world_size)
    assert_same(gradients(algorithm, policy, padded, parts=world_size - 1), plain)


@pytest.mark.parametrize("algorithm", PAIRWISE, ids=str)
def test_pairs_without_anything_that_counts_are_harmless(algorithm: Any) -> None:
    policy, batch = moved(Bigram()), pairs()
    batch.values["rejected_loss_mask"] = batch["rejected_loss_mask"] * torch.tensor([[1.0], [0.0], [1.0]])
    total, weight, grads = gradients(algorithm, policy, algorithm.prepare(policy, batch))
    assert weight == 2 and torch.tensor([total, *(g.sum() for g in grads)]).isfinite().all()
    batch.values["chosen_loss_mask"] = torch.zeros_like(batch["chosen_loss_mask"])
    total, weight, grads = gradients(algorithm, policy, algorithm.prepare(policy, batch))
    assert total == weight == 0.0 and all(g.abs().sum() == 0 for g in grads)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1000), extra=st.integers(1, 4), order=st.permutations(range(4)))
def test_labelled_rows_are_as_free_of_layout(seed: int, extra: int, order: list[int]) -> None:
    assert_free_of_layout(KTO(desirable_weight=1.3), labelled(seed=seed), "mismatched", extra, order, world_size=3)
