"""Variants of DPO, SimPO, ORPO, KTO and the reward model: values and slopes against loops in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import DPO, KTO, ORPO, RewardModel, SimPO, losses
from etude.errors import ConfigError, DataError
from etude.types import Batch
from tests.unit.algorithms.stand_in import Bigram, gradients, labelled, moved, pairs, rollouts
from tests.unit.algorithms.test_ranks import on_ranks

Row = Callable[[list[float], list[float]], float]
"""From the log-probabilities of the tokens of two texts, less those of the reference, to a loss."""


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def tokens_by_hand(table: np.ndarray, batch: Batch, prefix: str) -> list[list[float]]:
    """Return the log-probability of every counted token of every row."""
    found = []
    for ids, mask in zip(batch[f"{prefix}input_ids"].tolist(), batch[f"{prefix}loss_mask"].tolist(), strict=True):
        row = []
        for t in range(len(ids)):
            if mask[t]:
                scores = table[ids[t - 1] if t else 0]
                row.append(float(scores[ids[t]] - math.log(sum(math.exp(score) for score in scores))))
        found.append(row)
    return found


def slopes(loss: Callable[[np.ndarray], float], table: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Differentiate by moving every entry of the table a little."""
    found = np.zeros_like(table)
    for at in np.ndindex(*table.shape):
        up, down = table.copy(), table.copy()
        up[at], down[at] = up[at] + step, down[at] - step
        found[at] = (loss(up) - loss(down)) / (2 * step)
    return found


def probability(log_probs: list[float]) -> float:
    """Return the geometric mean of the probabilities of tokens."""
    return math.prod(math.exp(x) for x in log_probs) ** (1 / len(log_probs))


def simpo_row(chosen: list[float], rejected: list[float]) -> float:
    lead = 2.5 * (sum(chosen) / len(chosen)) - 2.5 * (sum(rejected) / len(rejected))
    return -math.log(sigmoid(lead - 0.7))


def orpo_row(chosen: list[float], rejected: list[float]) -> float:
    odds = [p / (1 - p) for p in (probability(chosen), probability(rejected))]
    return -math.log(probability(chosen)) - 0.3 * math.log(odds[0] / (odds[0] + odds[1]))


@pytest.mark.parametrize(
    "algorithm, row", [(SimPO(beta=2.5, gamma=0.7), simpo_row), (ORPO(beta=0.3), orpo_row)], ids=["simpo", "orpo"]
)
def test_losses_without_a_reference(algorithm: Any, row: Row) -> None:
    policy, batch = moved(Bigram()), pairs()

    def whole(table: np.ndarray) -> float:
        sides = (tokens_by_hand(table, batch, side) for side in ("chosen_", "rejected_"))
        return sum(row(chosen, rejected) for chosen, rejected in zip(*sides, strict=True))

    total, weight, found = gradients(algorithm, policy, algorithm.prepare(None, batch))
    table = policy.table.detach().numpy()
    assert weight == 3 and total == pytest.approx(whole(table), rel=1e-9)
    np.testing.assert_allclose(found[0].numpy(), slopes(whole, table), atol=1e-6)
    assert found[0].abs().sum() > 0.1


def robust_row(c: float, r: float, beta: float, e: float) -> float:
    """Mean over true labels of this is the loss of the true label: what makes it unbiased."""
    right, wrong = -math.log(sigmoid(beta * (c - r))), -math.log(sigmoid(beta * (r - c)))
    return ((1 - e) * right - e * wrong) / (1 - 2 * e)


VARIANTS: dict[str, Callable[[float, float], float]] = {
    "robust": lambda c, r: robust_row(c, r, 0.4, 0.2),
    "hinge": lambda c, r: max(0.0, 1 - 0.4 * (c - r)),
    "apo_zero": lambda c, r: (1 - sigmoid(0.4 * c)) + sigmoid(0.4 * r),
    "apo_down": lambda c, r: sigmoid(0.4 * c) + (1 - sigmoid(0.4 * (c - r))),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_dpo(name: Any) -> None:
    algorithm = DPO(beta=0.4, loss_type=name, label_smoothing=0.2 if name == "robust" else 0.0)
    policy, batch = moved(Bigram()), pairs(4)
    prepared = algorithm.prepare(policy, batch)
    assert policy.frozen is not None
    reference = policy.frozen.table.numpy()

    def whole(table: np.ndarray) -> float:
        gains = []
        for side in ("chosen_", "rejected_"):
            sides = tokens_by_hand(table, batch, side), tokens_by_hand(reference, batch, side)
            gains.append([sum(new) - sum(old) for new, old in zip(*sides, strict=True)])
        return sum(VARIANTS[name](c, r) for c, r in zip(*gains, strict=True))

    total, weight, found = gradients(algorithm, policy, prepared)
    table = policy.table.detach().numpy()
    assert weight == 4 and total == pytest.approx(whole(table), rel=1e-9)
    np.testing.assert_allclose(found[0].numpy(), slopes(whole, table), atol=1e-6)


@pytest.mark.parametrize("h", [-3.0, 0.5, 8.0])
def test_the_robust_loss_is_unbiased_under_wrong_labels(h: float) -> None:
    right, flipped = (losses.robust_dpo(torch.tensor([x]).double(), beta=0.7, noise=0.3).item() for x in (h, -h))
    assert 0.7 * right + 0.3 * flipped == pytest.approx(-math.log(sigmoid(0.7 * h)))


def test_robust_without_noise_is_dpo() -> None:
    h = torch.linspace(-5, 5, 7)
    assert losses.robust_dpo(h).tolist() == pytest.approx(losses.dpo(h).tolist())


def test_kto_by_hand() -> None:
    policy, batch = moved(Bigram()), labelled(5)
    algorithm = KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    prepared = algorithm.prepare(policy, batch)
    assert policy.frozen is not None
    table, reference = policy.table.detach().numpy(), policy.frozen.table.numpy()

    def gains(table: np.ndarray, prefix: str) -> list[float]:
        sides = tokens_by_hand(table, batch, prefix), tokens_by_hand(reference, batch, prefix)
        return [sum(new) - sum(old) for new, old in zip(*sides, strict=True)]

    z = max(0.0, sum(gains(table, "mismatched_")) / 5)  # of the policy as it is: a constant below

    def whole(table: np.ndarray) -> float:
        parts = []
        for gain, good in zip(gains(table, ""), batch["label"].tolist(), strict=True):
            parts.append(1.5 * (1 - sigmoid(0.3 * (gain - z))) if good else 0.5 * (1 - sigmoid(0.3 * (z - gain))))
        return sum(parts)

    total, weight, found = gradients(algorithm, policy, prepared)
    assert weight == 5 and total == pytest.approx(whole(table), rel=1e-9)
    np.testing.assert_allclose(found[0].numpy(), slopes(whole, table), atol=1e-6)
    assert prepared["kl_baseline"].tolist() == pytest.approx([z] * 5)
    assert float(algorithm.loss(policy, prepared).metrics["kl_baseline"]) == pytest.approx(z)


@pytest.mark.parametrize("seed", range(6))
def test_the_baseline_of_kto_is_never_negative(seed: int) -> None:
    policy, batch = moved(Bigram()), labelled(seed=seed)
    found = KTO().prepare(policy, batch)["kl_baseline"]
    assert (found >= 0).all() and not found.requires_grad
    assert (KTO(baseline="zero").prepare(policy, batch)["kl_baseline"] == 0).all()
    swapped = Batch({name: value for name, value in batch.values.items() if not name.startswith("mismatched")})
    assert (KTO(baseline="zero").prepare(policy, swapped)["kl_baseline"] == 0).all()
    with pytest.raises(DataError, match="mismatched_input_ids"):
        KTO().prepare(policy, swapped)


def test_the_baseline_of_kto_is_that_of_all_ranks() -> None:
    policy = moved(Bigram())
    batch = next(b for b in (labelled(6, seed) for seed in range(20)) if KTO().prepare(policy, b)["kl_baseline"][0] > 0)
    expected = gradients(KTO(), policy, KTO().prepare(policy, batch))
    parts = [batch.select([0, 1, 2, 3]), batch.select([4, 5])]

    def work(rank: int, gather: Any) -> Batch:
        algorithm = KTO()
        algorithm.gather = gather
        return algorithm.prepare(policy, parts[rank])

    found = [gradients(KTO(), policy, part) for part in on_ranks(work, 2)]
    assert sum(one[0] for one in found) == pytest.approx(expected[0], abs=1e-12)
    np.testing.assert_allclose((found[0][2][0] + found[1][2][0]).numpy(), expected[2][0].numpy(), atol=1e-12)


@pytest.mark.parametrize("margins", [None, [0.5, 0.0, 2.0]])
def test_the_reward_model_by_hand(margins: list[float] | None) -> None:
    policy, batch = moved(Bigram()), pairs()
    if margins is not None:
        batch.values["margin"] = torch.tensor(margins)
    values = policy.value.detach().numpy()

    def last_state(side: str) -> list[int]:
        rows = zip(batch[f"{side}_input_ids"].tolist(), batch[f"{side}_loss_mask"].tolist(), strict=True)
        return [ids[max(t for t in range(len(ids)) if mask[t]) - 1] for ids, mask in rows]

    states = list(zip(last_state("chosen"), last_state("rejected"), strict=True))

    def whole(values: np.ndarray) -> float:
        found = 0.0
        for (c, r), margin in zip(states, margins or [0.0] * 3, strict=True):
            found += 0.1 * (values[c] + values[r]) ** 2 + math.log(1 + math.exp(-(values[c] - values[r] - margin)))
        return found

    total, weight, found = gradients(RewardModel(center=0.1), policy, RewardModel().prepare(policy, batch))
    assert weight == 3 and total == pytest.approx(whole(values), rel=1e-9)
    np.testing.assert_allclose(found[1].numpy(), slopes(whole, values), atol=1e-6)


@pytest.mark.parametrize("algorithm", [SimPO(), ORPO(), RewardModel(), DPO(loss_type="apo_zero")], ids=str)
def test_rollouts_become_pairs_for_all_of_them(algorithm: Any) -> None:
    batch = rollouts(6, 3)
    batch.metadata["rewards"] = [1.0, 3.0, 2.0, 5.0, 5.0, 5.0]
    found = algorithm.experience(Bigram(), batch)
    assert len(found) == 1 and float(algorithm.loss(Bigram(), found).weight) == 1


def test_a_reward_model_needs_a_value_head() -> None:
    class Headless(Bigram):
        def log_probs(self, batch: Any, **_: Any) -> Any:
            return super().log_probs(batch)

    with pytest.raises(ConfigError, match="value_head: true"):
        RewardModel().loss(Headless(), pairs())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SimPO(beta=0.0), "beta must be positive"),
        (lambda: SimPO(gamma=-1.0), "gamma not negative"),
        (lambda: ORPO(beta=-0.1), "beta must not be negative"),
        (lambda: KTO(beta=0.0), "beta must be positive"),
        (lambda: KTO(undesirable_weight=-1.0), "undesirable_weight"),
        (lambda: KTO(baseline="mean"), "unknown baseline 'mean'"),
        (lambda: RewardModel(center=-1.0), "center"),
        (lambda: DPO(loss_type="exo"), "unknown loss_type 'exo'"),
        (lambda: DPO(loss_type="hinge", label_smoothing=0.1), "hinge has no label_smoothing"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("far", [-1e4, -50.0, -1e-12, 0.0])
def test_certain_and_impossible_texts_have_finite_odds(far: float) -> None:
    mean = torch.tensor([far], requires_grad=True)
    for other in (-1e4, -0.5, 0.0):
        loss = losses.orpo(mean, torch.tensor([other])) + losses.orpo(torch.tensor([other]), mean)
        (slope,) = torch.autograd.grad(loss.sum(), mean)
        assert loss.isfinite().all() and slope.isfinite().all()
