"""GMPO, SAPO, GKD, truncated importance sampling, penalties on length and groups of equal reward: by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from etude.algorithms import (
    CISPO,
    DRO,
    GKD,
    GMPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    SAPO,
    Distillation,
    ReMax,
    advantages,
    losses,
)  # fmt: skip
from etude.errors import ConfigError, DataError
from etude.types import Batch
from tests.unit.algorithms.stand_in import Bigram, gradients, moved, rollouts
from tests.unit.algorithms.test_pair_variants import slopes, tokens_by_hand

Row = Callable[[list[float], list[float], float], float]
"""From the log-probabilities of the tokens of a text, the sampler's, and its advantage to the loss of the row."""


def gmpo_row(new: list[float], old: list[float], advantage: float) -> float:
    """Product of the pessimistic ratios to the power of 1 / n, with clips e^-0.1 and e^0.2."""
    product = 1.0
    for n, o in zip(new, old, strict=True):
        ratio = math.exp(n) / math.exp(o)
        bounded = min(max(ratio, math.exp(-0.1)), math.exp(0.2))
        product *= min(ratio, bounded) if advantage > 0 else max(ratio, bounded)
    return -advantage * product ** (1 / len(new))


def sapo_row(new: list[float], old: list[float], advantage: float) -> float:
    tau = 0.8 if advantage > 0 else 1.4
    gates = [4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))) for n, o in zip(new, old, strict=True)]
    return -advantage * sum(gates) / len(gates)


def numbers(batch: Batch, name: str) -> list[list[float]]:
    rows = zip(batch[name].tolist(), batch["loss_mask"].tolist(), strict=True)
    return [[value for value, counted in zip(values, mask, strict=True) if counted] for values, mask in rows]


def group_advantages(rewards: list[float], size: int) -> list[float]:
    found = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean = sum(group) / size
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (size - 1))
        found += [(r - mean) / (deviation + 1e-6) for r in group]
    return found


@pytest.mark.parametrize(
    "algorithm, row",
    [(GMPO(clip_low=0.1, clip_high=0.2), gmpo_row), (SAPO(tau_pos=0.8, tau_neg=1.4), sapo_row)],
    ids=["gmpo", "sapo"],
)
def test_losses_of_rows(algorithm: Any, row: Row) -> None:
    policy, batch = moved(Bigram()), rollouts()
    credit = group_advantages(batch["rewards"].tolist(), 3)

    def whole(table: np.ndarray) -> float:
        parts = zip(tokens_by_hand(table, batch, ""), numbers(batch, "old_log_probs"), credit, strict=True)
        return sum(row(*part) for part in parts)

    total, weight, found = gradients(algorithm, policy, algorithm.experience(policy, batch))
    table = policy.table.detach().numpy()
    assert weight == 6 and total == pytest.approx(whole(table), rel=1e-9)
    np.testing.assert_allclose(found[0].numpy(), slopes(whole, table), atol=1e-6)


def test_the_gate_of_sapo_has_the_slope_of_the_ratio_where_nothing_has_moved() -> None:
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    losses.sapo(new, new.detach(), torch.tensor([[2.0, -3.0]]), torch.ones(1, 2)).sum().backward()
    assert new.grad is not None and new.grad.tolist()[0] == pytest.approx([-2.0, 3.0])


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_gkd_by_hand(beta: float) -> None:
    policy, batch, teacher = moved(Bigram()), rollouts(), Bigram(5)
    algorithm = GKD(teacher=teacher, beta=beta, on_policy=0.0, temperature=1.5)

    def distribution(scores: np.ndarray) -> list[float]:
        powers = [math.exp(score / 1.5) for score in scores]
        return [power / sum(powers) for power in powers]

    def divergence(p: list[float], t: list[float]) -> float:
        mixed = [beta * b + (1 - beta) * a for a, b in zip(p, t, strict=True)]
        to_t = sum(b * math.log(b / m) for b, m in zip(t, mixed, strict=True))
        to_p = sum(a * math.log(a / m) for a, m in zip(p, mixed, strict=True))
        return to_t if beta == 0 else to_p if beta == 1 else beta * to_t + (1 - beta) * to_p

    def whole(table: np.ndarray) -> float:
        found = 0.0
        for ids, mask in zip(batch["input_ids"].tolist(), batch["loss_mask"].tolist(), strict=True):
            states = [ids[t - 1] for t in range(len(ids)) if mask[t]]
            graded = teacher.table.detach().numpy()
            found += sum(divergence(distribution(table[s]), distribution(graded[s])) for s in states)
        return found

    total, weight, found = gradients(algorithm, policy, algorithm.prepare(policy, batch))
    table = policy.table.detach().numpy()
    assert weight == batch["loss_mask"].sum() and total == pytest.approx(whole(table), rel=1e-9)
    np.testing.assert_allclose(found[0].numpy(), slopes(whole, table), atol=1e-6)


def test_the_divergence_of_gkd_is_bounded_where_neither_or_one_can_choose() -> None:
    inf = math.inf
    logits = torch.tensor([[[0.0, -inf, 0.0, -inf]]], requires_grad=True)
    found = losses.generalised_jsd(logits, torch.tensor([[[-inf, 0.0, 0.0, -inf]]]), torch.ones(1, 1))
    found.sum().backward()
    assert found.item() == pytest.approx(math.log(2) / 2)  # they share half of their mass
    assert logits.grad is not None and logits.grad.isfinite().all()


class Writer(Bigram):
    """Writes the key's last digit as its whole completion."""

    pad_token_id = 0

    def generate(self, prompts: Any, sampling: Any, *, n: int, keys: Any) -> Any:
        self.asked = [list(prompt) for prompt in prompts]
        written = [type("Written", (), {"tokens": [key % 7] * min(2, sampling.max_new_tokens)}) for key in keys]
        return [[one] * n for one in written]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_texts_is_written_by_the_student(share: float) -> None:
    policy, batch = Writer(), rollouts(40, 1)
    algorithm = GKD(teacher=Bigram(5), on_policy=share)
    torch.manual_seed(3)
    found = algorithm.prepare(policy, batch)
    torch.manual_seed(3)
    again = algorithm.prepare(policy, batch)
    assert torch.equal(found["input_ids"], again["input_ids"])
    lengths = found["loss_mask"].sum(1).tolist()
    texts, given = tokens(found), tokens(batch)
    own = [i for i in range(40) if texts[i] != given[i]]
    assert (len(own) == 0) if share == 0 else (len(own) > 35) if share == 1 else 10 < len(own) < 30
    assert all(lengths[i] == 2 and texts[i][:2] == given[i][:2] for i in own)
    assert tokens(algorithm.prepare(policy.eval(), batch)) == given  # evaluation is of the texts as they are
    assert tokens(algorithm.prepare(policy.train(), algorithm.experience(policy, batch))) == given  # rollouts too


def tokens(batch: Batch) -> list[list[int]]:
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    return [[token for token, there in zip(ids, mask, strict=True) if there] for ids, mask in rows]


def test_truncated_weights_correct_for_the_sampler() -> None:
    policy, batch = moved(Bigram()), rollouts()
    plain, corrected = GRPO(aggregation="token_mean"), GRPO(aggregation="token_mean", tis_cap=1.5)
    experience = corrected.experience(policy, batch)
    sampler, own = numbers(batch, "old_log_probs"), tokens_by_hand(policy.table.detach().numpy(), batch, "")
    assert numbers(experience, "rollout_log_probs") == sampler
    np.testing.assert_allclose(np.concatenate(numbers(experience, "old_log_probs")), np.concatenate(own), atol=1e-12)
    credit = group_advantages(batch["rewards"].tolist(), 3)
    expected = weights = 0.0
    for row, said, advantage in zip(own, sampler, credit, strict=True):
        for new, old in zip(row, said, strict=True):  # nothing has moved since: the ratio of PPO is 1
            weight = min(math.exp(new - old), 1.5)
            expected, weights = expected - weight * advantage, weights + weight
    loss = corrected.loss(policy, experience)
    assert loss.total.item() == pytest.approx(expected, rel=1e-9)
    assert float(loss.metrics["tis_weight"]) == pytest.approx(weights / float(loss.weight))
    assert corrected.prepare(policy, experience)["old_log_probs"] is experience["old_log_probs"]
    unknown = rollouts()
    del unknown.values["old_log_probs"]  # a sampler that says nothing is taken to be the policy
    found = corrected.loss(policy, corrected.experience(policy, unknown))
    assert found.total.item() == pytest.approx(plain.loss(policy, plain.experience(policy, unknown)).total.item())
    assert float(found.metrics["tis_weight"]) == pytest.approx(1.0)


def test_one_update_of_older_rollouts_asks_the_policy_once_and_moves_it_as_if_it_were_asked_before() -> None:
    batch, asked = rollouts(), GRPO(tis_cap=2.0)
    spared = GRPO()
    spared.is_behind = spared.updates_once = True
    assert spared.weight_cap == asked.weight_cap
    found = []
    for algorithm in (asked, spared):
        policy = moved(Bigram())
        experience = algorithm.experience(policy, batch)
        assert ("old_log_probs" in experience.values) == (algorithm is asked)
        found.append(gradients(algorithm, policy, experience)[2][0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_the_weight_has_no_gradient() -> None:
    policy, batch = moved(Bigram()), rollouts()
    algorithm = GRPO(tis_cap=1e9, objective="importance_sampling", aggregation="token_sum")
    experience = algorithm.experience(policy, batch)
    credit = group_advantages(batch["rewards"].tolist(), 3)
    table, said = policy.table.detach().numpy(), numbers(batch, "old_log_probs")
    held = tokens_by_hand(table, batch, "")

    def whole(moved_table: np.ndarray) -> float:
        rows = zip(tokens_by_hand(moved_table, batch, ""), held, said, credit, strict=True)
        return -sum(
            a * math.exp(n - h) * math.exp(h - s) for new, old, sampler, a in rows
            for n, h, s in zip(new, old, sampler, strict=True)
        )  # fmt: skip

    np.testing.assert_allclose(gradients(algorithm, policy, experience)[2][0].numpy(), slopes(whole, table), atol=1e-6)


def test_the_penalty_on_length_is_that_of_dapo() -> None:
    lengths = torch.tensor([0, 6, 8, 9, 10, 12])
    found = advantages.overlong_penalty(lengths, longest=10, buffer=4, penalty=2.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, -1.0, -1.5, -2.0, -2.0])
    assert advantages.overlong_penalty(lengths, longest=9, buffer=0).tolist() == [0, 0, 0, 0, -1, -1]


@pytest.mark.parametrize("in_reward", [False, True])
def test_long_completions_earn_less(in_reward: bool) -> None:
    batch = rollouts()
    shaped = RLOO(overlong_length=4, overlong_buffer=2, overlong_penalty=3.0)
    lengths = batch["loss_mask"].sum(1).tolist()
    expected = [r - 3.0 * min(max((n - 2) / 2, 0), 1) for r, n in zip(batch["rewards"].tolist(), lengths, strict=True)]
    assert expected != batch["rewards"].tolist()
    if in_reward:
        by_token = shaped.token_rewards(batch)
        assert by_token.sum(1).tolist() == pytest.approx(expected)
        ends = [max(t for t, m in enumerate(row) if m) for row in batch["loss_mask"].tolist()]
        assert [by_token[i, t].item() for i, t in enumerate(ends)] == pytest.approx(expected)
    else:
        assert shaped.scores(batch).tolist() == pytest.approx(expected)
        batch.values["token_level_scores"] = shaped.token_rewards(rollouts())
        bare = RLOO().advantages(batch).metadata["advantages"].tolist()
        assert shaped.advantages(rollouts()).metadata["advantages"].tolist() == pytest.approx(bare)


def test_groups_of_equal_reward_weigh_nothing_when_dropped() -> None:
    policy, batch = moved(Bigram()), rollouts()
    batch.metadata["rewards"] = [1.0, 1.0, 1.0, 0.0, 2.0, 0.0]
    assert advantages.informative(batch["rewards"], batch["group_id"]).tolist() == [False] * 3 + [True] * 3
    kept, dropped = GRPO(), GRPO(drop_equal_groups=True)
    with_all = gradients(kept, policy, kept.experience(policy, batch))
    without = gradients(dropped, policy, dropped.experience(policy, batch))
    assert (with_all[1], without[1]) == (6, 3) and with_all[0] == pytest.approx(without[0])
    alone = gradients(kept, policy, kept.experience(policy, batch.select([3, 4, 5])))
    assert alone[:2] == pytest.approx(without[:2])
    with pytest.raises(DataError, match="group_id"):
        PPO(drop_equal_groups=True).experience(policy, Batch(dict(batch.values), {"rewards": batch["rewards"]}))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SAPO(tau_pos=0.0), "tau_pos and tau_neg"),
        (lambda: SAPO(clip_low=0.1), "leave clip_low and clip_high out"),
        (lambda: SAPO(dual_clip=3.0), "leave objective and dual_clip out"),
        (lambda: GMPO(objective="importance_sampling"), "GMPO has an objective of its own"),
        (lambda: GSPO(dual_clip=3.0), "GSPO has an objective of its own"),
        (lambda: CISPO(clip_high=0.3), "CISPO does not clip as PPO does"),
        (lambda: CISPO(ratio_low=2.0, ratio_high=1.0), "ratio_low"),
        (lambda: DRO(objective="importance_sampling"), "DRO has an objective of its own"),
        (lambda: GKD(teacher=None), "needs a teacher"),
        (lambda: GKD(teacher=Bigram(), beta=1.5), "beta and on_policy"),
        (lambda: GKD(teacher=Bigram(), temperature=0.0), "temperature"),
        (lambda: GKD(teacher=Bigram(), aggregation="length_normalised"), "give a length"),
        (lambda: GRPO(tis_cap=0.0), "tis_cap"),
        (lambda: GRPO(overlong_buffer=3), "overlong_length"),
        (lambda: GRPO(overlong_length=2, overlong_buffer=3), "overlong_buffer"),
        (lambda: GRPO(length=0), "length must be at least 1"),
        (lambda: ReMax(overlong_length=3), "greedy completions"),
        (lambda: Distillation(drop_equal_groups=True), "knows no rewards"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_policy_that_cannot_write_takes_given_text_alone() -> None:
    with pytest.raises(ConfigError, match="on_policy: 0"):
        GKD(teacher=Bigram(5), on_policy=1.0).prepare(Bigram(), rollouts())
