"""The algorithms as classes: a whole update written out in NumPy, gradients by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import CISPO, DRO, GRPO, GSPO, OPO, PPO, RLOO, SFT, DrGRPO, ReinforcePlusPlus, ReMax
from etude.errors import ConfigError, DataError
from etude.registry import ALGORITHM_REGISTRY
from etude.types import Batch
from tests.unit.algorithms.stand_in import Bigram, assert_close, gradients, moved, rollouts


def arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ids, mask, old = (batch[name].numpy() for name in ("input_ids", "loss_mask", "old_log_probs"))
    return ids, mask, old, batch["rewards"].numpy(), np.array(batch["group_id"])


def log_probs_by_hand(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    found = np.zeros(ids.shape)
    for i, row in enumerate(ids):
        for t, token in enumerate(row):
            logits = table[row[t - 1] if t else 0]
            found[i, t] = logits[token] - np.log(np.exp(logits).sum())
    return found


def advantages_by_hand(name: str, batch: Batch) -> np.ndarray:
    _, mask, _, rewards, groups = arrays(batch)
    found = np.zeros(len(rewards))
    for i, group in enumerate(groups):
        rows = np.flatnonzero(groups == group)
        mine = rewards[rows]
        lengths = mask[rows].sum(1)
        others = rewards[[j for j in rows if j != i]]
        found[i] = {
            "grpo": (rewards[i] - mine.mean()) / (mine.std(ddof=1) + 1e-6),
            "dr_grpo": rewards[i] - mine.mean(),
            "rloo": rewards[i] - others.mean(),
            "opo": rewards[i] - (lengths * mine).sum() / lengths.sum(),
            "remax": rewards[i] - batch["greedy_rewards"][i],
        }[name]
    return found[:, None] * mask


def update_by_hand(name: str, table: np.ndarray, batch: Batch, advantages: np.ndarray) -> float:
    """Return the loss that is differentiated: total / weight, from the formulas of the documentation."""
    ids, mask, old, _, _ = arrays(batch)
    new = log_probs_by_hand(table, ids)
    lengths = mask.sum(1)
    ratio = np.exp((new - old) * mask)
    clipped = np.clip(ratio, 0.8, 1.2)
    tokens = -np.minimum(ratio * advantages, clipped * advantages) * mask
    if name == "gspo":
        sequence = np.exp(((new - old) * mask).sum(1) / lengths)[:, None]
        bounded = np.clip(sequence, 1 - 3e-4, 1 + 4e-4)
        tokens = -np.minimum(sequence * advantages, bounded * advantages) * mask
    if name == "dro":
        tokens = -(new * advantages - 0.5 * 0.05 * (new - old) ** 2) * mask
    if name in ("grpo", "gspo"):
        return float((tokens.sum(1) / lengths).mean())
    if name == "dr_grpo":
        return float(tokens.sum() / lengths.max() / len(ids))
    return float(tokens.sum() / mask.sum())


@pytest.mark.parametrize(
    "algorithm, name, estimator",
    [
        (GRPO(), "grpo", "grpo"),
        (DrGRPO(), "dr_grpo", "dr_grpo"),
        (GSPO(), "gspo", "grpo"),
        (DRO(), "dro", "grpo"),
        (RLOO(), "rloo", "rloo"),
        (OPO(), "opo", "opo"),
        (ReMax(), "remax", "remax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_update_is_what_the_formulas_say(algorithm: Any, name: str, estimator: str) -> None:
    policy, batch = moved(Bigram()), rollouts()
    experience = algorithm.experience(policy, batch)
    advantages = advantages_by_hand(estimator, batch)
    np.testing.assert_allclose(experience.values["advantages"].numpy(), advantages, atol=1e-12)
    total, weight, found = gradients(algorithm, policy, experience)
    table = policy.table.detach().numpy()
    assert total / weight == pytest.approx(update_by_hand(name, table, batch, advantages), abs=1e-12)
    step, checked = 1e-6, 0
    for at in [(0, 1), (1, 2), (2, 0), (2, 3), (2, 6), (4, 4), (5, 1), (6, 2)]:
        up, down = table.copy(), table.copy()
        up[at], down[at] = up[at] + step, down[at] - step
        slope = update_by_hand(name, up, batch, advantages) - update_by_hand(name, down, batch, advantages)
        assert found[0][at].item() / weight == pytest.approx(slope / (2 * step), abs=1e-8)
        checked += slope != 0
    assert checked >= 4


def test_cispo_stops_the_gradient_of_its_weights() -> None:
    policy, batch = moved(Bigram()), rollouts()
    algorithm = CISPO(ratio_high=1.2)
    experience = algorithm.experience(policy, batch)
    total, weight, found = gradients(algorithm, policy, experience)
    ids, mask, old, _, _ = arrays(batch)
    table = policy.table.detach().numpy()
    new = log_probs_by_hand(table, ids)
    factor = np.clip(np.exp((new - old) * mask), 0.0, 1.2) * advantages_by_hand("grpo", batch)
    assert total == pytest.approx(-(factor * new).sum(), abs=1e-10) and weight == mask.sum()
    expected = np.zeros_like(table)
    for i, t in zip(*np.nonzero(mask), strict=True):
        before = ids[i, t - 1]
        probabilities = np.exp(table[before]) / np.exp(table[before]).sum()
        expected[before] -= factor[i, t] * (np.eye(len(table))[ids[i, t]] - probabilities)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-10)


def test_reinforce_plus_plus_normalises_the_whole_experience() -> None:
    batch = rollouts()
    found = ReinforcePlusPlus().advantages(batch)
    _, mask, _, rewards, groups = arrays(batch)
    returns = rewards[:, None] * mask
    flat = returns[mask == 1]
    expected = (returns - flat.mean()) / np.sqrt(flat.var() + 1e-8) * mask
    np.testing.assert_allclose(found.values["advantages"].numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(found["returns"].numpy(), returns, atol=1e-12)
    centred = ReinforcePlusPlus(group_baseline=True).advantages(batch)
    less = (rewards - np.array([rewards[groups == g].mean() for g in groups]))[:, None] * mask
    np.testing.assert_allclose(centred["returns"].numpy(), less, atol=1e-12)


def test_ppo_learns_values_and_credits_tokens_by_them() -> None:
    policy, batch = moved(Bigram()), rollouts()
    algorithm = PPO(gamma=0.9, lam=0.8, whiten=False, value_coef=0.7, value_clip=0.1, epochs=4, minibatches=2)
    experience = algorithm.experience(policy, batch, rows=4)
    ids, mask, old, rewards, _ = arrays(batch)
    before = np.concatenate((np.zeros((len(ids), 1), dtype=int), ids[:, :-1]), 1)
    values = policy.value.detach().numpy()[before] * mask
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(len(ids)):
        carried = following = 0.0
        for k, t in enumerate(reversed(np.flatnonzero(mask[i]))):
            error = (rewards[i] if k == 0 else 0.0) + 0.9 * following - values[i, t]
            carried = error + 0.9 * 0.8 * carried
            advantages[i, t], returns[i, t], following = carried, carried + values[i, t], values[i, t]
    np.testing.assert_allclose(experience.values["advantages"].numpy(), advantages, atol=1e-12)
    np.testing.assert_allclose(experience["returns"].numpy(), returns, atol=1e-12)
    with torch.no_grad():
        policy.value += 0.3  # the values have moved further than the clip
    total, weight, found = gradients(algorithm, policy, experience)
    new = log_probs_by_hand(policy.table.detach().numpy(), ids)
    ratio = np.exp((new - old) * mask)
    tokens = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    moved_values = values + 0.3 * mask
    far, near = (moved_values - returns) ** 2, (values + 0.1 - returns) ** 2
    tokens = tokens + 0.7 * 0.5 * np.maximum(far, near)
    assert total == pytest.approx((tokens * mask).sum(), abs=1e-10) and weight == mask.sum()
    expected = np.zeros(7)
    np.add.at(expected, before, 0.7 * (moved_values - returns) * (far >= near) * mask)
    np.testing.assert_allclose(found[1].numpy(), expected, atol=1e-10)
    whitened = PPO().experience(policy, batch)
    counted = whitened.values["advantages"][whitened["loss_mask"] == 1]
    assert abs(counted.mean().item()) < 1e-9 and counted.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert (algorithm.epochs, algorithm.minibatches) == (4, 2)


def test_a_value_after_the_end_stands_for_what_was_cut_off() -> None:
    policy, batch = Bigram(), rollouts()
    batch.metadata["bootstrap"] = [2.0] * len(batch)
    cut, ended = (PPO(whiten=False).experience(policy, b)["returns"] for b in (batch, rollouts()))
    assert (cut > ended)[batch["loss_mask"] == 1].all()


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_divergence_as_a_loss(kind: Any) -> None:
    policy, batch = moved(Bigram()), rollouts()
    plain, held = GRPO(aggregation="token_mean"), GRPO(aggregation="token_mean", kl_coef=0.5, kl_kind=kind)
    experience = held.experience(policy, batch)
    ids, mask, _, _, _ = arrays(batch)
    with policy.reference() as reference:
        ref = log_probs_by_hand(reference.table.numpy(), ids)
    np.testing.assert_allclose(experience["ref_log_probs"].numpy()[mask == 1], ref[mask == 1], atol=1e-12)
    delta = (log_probs_by_hand(policy.table.detach().numpy(), ids) - ref) * mask
    term = 0.5 * delta**2 if kind == "k2" else np.exp(-delta) + delta - 1
    with_kl, weight, _ = gradients(held, policy, experience)
    without, _, _ = gradients(plain, policy, experience)
    assert with_kl - without == pytest.approx(0.5 * (term * mask).sum(), abs=1e-10)
    assert held.loss(policy, experience).metrics["kl"].item() == pytest.approx(
        ((np.exp(-delta) + delta - 1) * mask).sum() / weight
    )
    assert all(p.grad is None for p in policy.frozen.parameters())  # type: ignore[union-attr]


def test_divergence_in_the_reward_and_a_coefficient_that_adapts() -> None:
    policy, batch = moved(Bigram()), rollouts()
    algorithm = RLOO(kl_coef=0.5, kl_kind="k1", kl_in="reward", kl_target=0.01, kl_horizon=100)
    experience = algorithm.experience(policy, batch)
    ids, mask, old, rewards, groups = arrays(batch)
    with policy.reference() as reference:
        delta = (old - log_probs_by_hand(reference.table.numpy(), ids)) * mask
    scores = rewards - 0.5 * delta.sum(1)
    expected = [scores[i] - scores[(groups == groups[i]) & (np.arange(6) != i)].mean() for i in range(6)]
    np.testing.assert_allclose(experience.metadata["advantages"].numpy(), expected, atol=1e-6)
    error = np.clip(delta.sum() / mask.sum() / 0.01 - 1, -0.2, 0.2)
    assert algorithm.state_dict()["kl_coef"] == pytest.approx(0.5 * (1 + error * 6 / 100))
    other = RLOO(kl_coef=0.5, kl_kind="k1", kl_in="reward", kl_target=0.01)
    other.load_state_dict(algorithm.state_dict())
    assert other.controller.value == algorithm.controller.value


def test_an_entropy_bonus() -> None:
    policy, batch = Bigram(), rollouts()
    plain, bold = GRPO(aggregation="token_mean"), GRPO(aggregation="token_mean", entropy_coef=0.1)
    experience = plain.experience(policy, batch)
    loss = bold.loss(policy, experience)
    entropy = float(loss.metrics["entropy"])
    ids, mask, _, _, _ = arrays(batch)
    p = torch.softmax(policy.table.detach(), -1).numpy()
    by_hand = -(p * np.log(p)).sum(-1)[np.concatenate((np.zeros((6, 1), dtype=int), ids[:, :-1]), 1)]
    assert entropy == pytest.approx((by_hand * mask).sum() / mask.sum())
    difference = plain.loss(policy, experience).total.item() - loss.total.item()
    assert difference == pytest.approx(0.1 * entropy * mask.sum())


def test_on_policy_the_ratio_is_one_and_old_log_probs_are_made_if_absent() -> None:
    policy, batch = Bigram(), rollouts()
    del batch.values["old_log_probs"]
    experience = GRPO().experience(policy, batch)
    loss = GRPO().loss(policy, experience)
    assert float(loss.metrics["old_kl"]) == float(loss.metrics["clip_fraction"]) == 0.0
    plain = GRPO(objective="importance_sampling")
    assert "clip_fraction" not in plain.loss(policy, experience).metrics
    for one, other in zip(
        gradients(GRPO(), policy, experience)[2], gradients(plain, policy, experience)[2], strict=True
    ):
        assert_close(one, other)


def test_prepare_keeps_what_is_there_and_fills_in_the_rest() -> None:
    policy, batch = Bigram(), rollouts()
    batch.metadata["advantages"] = [1.0] * 6
    prepared = GRPO(kl_coef=0.1).prepare(policy, batch)
    assert prepared.metadata["advantages"].tolist() == [1.0] * 6 and "ref_log_probs" in prepared
    assert "ref_log_probs" not in batch  # what was given is left alone
    assert not prepared["ref_log_probs"].requires_grad
    plain = GRPO().prepare(policy, dict(rollouts().to_dict()))  # dictionaries will do
    assert plain.values["advantages"].shape == plain["loss_mask"].shape


def test_token_level_scores_replace_the_reward() -> None:
    batch = rollouts()
    batch.values["token_level_scores"] = torch.where(batch["loss_mask"] != 0, 1.0, torch.nan)
    found = DrGRPO().advantages(batch).metadata["advantages"]
    lengths = batch["loss_mask"].sum(1).numpy()
    groups = np.array(batch["group_id"])
    expected = lengths - np.array([lengths[groups == g].mean() for g in groups])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_runs_may_be_averaged_first() -> None:
    batch = rollouts(4, 4)
    batch.metadata["rewards"], batch.metadata["run_id"] = [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]
    found = GRPO(by_run=True).advantages(batch)
    assert found.metadata["advantages"].tolist() == pytest.approx([0.7071058] * 3 + [-0.7071058], abs=1e-6)


def test_padding_rows_enter_no_statistics_and_no_loss() -> None:
    policy, batch = Bigram(), rollouts(3, 3)
    padded = batch.pad_to_world_size(4)
    for algorithm in (GRPO(), RLOO(), OPO(), ReinforcePlusPlus(), PPO(), SFT()):
        plain, wide = batch, padded
        if hasattr(algorithm, "experience"):
            plain, wide = algorithm.experience(policy, batch), algorithm.experience(policy, padded)
            assert_close(wide.values["advantages"][:3], plain.values["advantages"])
            assert wide.values["advantages"][3].abs().sum() == 0
        assert gradients(algorithm, policy, wide)[:2] == pytest.approx(gradients(algorithm, policy, plain)[:2])


def test_sft_is_cross_entropy() -> None:
    policy, batch = Bigram(), rollouts()
    ids, mask, _, _, _ = arrays(batch)
    new = log_probs_by_hand(policy.table.detach().numpy(), ids)
    loss = SFT().loss(policy, batch)
    assert loss.total.item() == pytest.approx(-(new * mask).sum()) and float(loss.weight) == mask.sum()
    batch.values["weights"] = torch.full_like(batch["loss_mask"], -2.0)
    assert SFT().loss(policy, batch).total.item() == pytest.approx(2 * (new * mask).sum())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: GRPO(kl_coef=0.1, kl_kind="k1"), "k1 as a loss"),
        (lambda: GRPO(epochs=0), "at least 1"),
        (lambda: GRPO(dual_clip=0.5), "dual_clip"),
        (lambda: GRPO(clip_low=2.0), "clip_low"),
        (lambda: PPO(kl_target=1.0), "kl_target needs"),
        (lambda: RLOO(kl_coef=-1.0), "kl_coef"),
    ],
)
def test_parameters_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_a_batch_lacks_is_named() -> None:
    policy, batch = Bigram(), rollouts()
    with pytest.raises(DataError, match="'advantages'"):
        GRPO().loss(policy, batch)
    with pytest.raises(DataError, match="greedy_rewards"):
        ReMax().advantages(batch.__class__(dict(batch.values), {"rewards": batch["rewards"]}))
    with pytest.raises(DataError, match="lacks 'group_id'"):
        GRPO().advantages(Batch(dict(batch.values), {"rewards": batch["rewards"]}))
    with pytest.raises(DataError, match="'rewards'"):
        RLOO().advantages(Batch(dict(batch.values)))


def test_every_algorithm_has_a_key_and_serves_with_its_defaults() -> None:
    keys = {"cispo", "distillation", "dpo", "dr_grpo", "dro", "grpo", "gspo", "ipo", "opo", "ppo"}
    keys |= {"reinforce_plus_plus", "remax", "rloo", "sft", "bc"}
    keys |= {"gmpo", "kto", "orpo", "reward_model", "sapo", "simpo"}
    assert keys | {"gkd"} <= set(ALGORITHM_REGISTRY)
    for key in keys:
        assert callable(ALGORITHM_REGISTRY.get(key)().loss)
