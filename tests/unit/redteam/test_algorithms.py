"""DPO, IPO and PPO on trees, against formulas written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.redteam.algorithms import DPO, IPO, PPO
from etude.rollouts.graph import Graph, Node
from tests.unit.redteam.tiny_models import make_sampler, make_system, tiny


class Table:
    """A system of one parameter per probe: its log-probabilities are looked up, two tokens to a probe."""

    def __init__(self) -> None:
        self.weights = torch.tensor([[-1.0, -2.0], [-0.5, -0.25], [-3.0, 0.0]], requires_grad=True)
        self.values = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.0]], requires_grad=True)
        self.baseline = torch.tensor([[-1.5, -1.0], [-1.0, -0.5], [-2.0, 0.0]])

    def auditor_logprobs(self, contexts: Any, probes: Any) -> Tensor:
        return self.weights[[int(probe) for probe in probes]]

    def baseline_logprobs(self, contexts: Any, probes: Any) -> Tensor:
        return self.baseline[[int(probe) for probe in probes]]

    def value(self, contexts: Any, probes: Any) -> Tensor:
        return self.values[[int(probe) for probe in probes]]


def tree(*rewards: float) -> Graph:
    return Graph("c", [Node("c", str(at), "r", reward) for at, reward in enumerate(rewards)])


def test_pairs_are_the_best_and_the_worst_sibling() -> None:
    (pair,) = DPO(Table()).flatten(tree(0.2, 0.9, 0.1))
    assert pair == {"context": "c", "chosen": "1", "rejected": "2", "chosen_reward": 0.9, "rejected_reward": 0.1}
    every = DPO(Table(), pairs="all").flatten(tree(0.2, 0.9, 0.1))
    assert sorted((p["chosen"], p["rejected"]) for p in every) == [("0", "2"), ("1", "0"), ("1", "2")]


def test_ties_and_repetitions_make_no_pair() -> None:
    solver = DPO(Table(), pairs="all")
    assert solver.flatten(tree(0.5, 0.5)) == []
    assert solver.flatten(Graph("c", [Node("c", "same", "x", 0.1), Node("c", "same", "y", 0.9)])) == []
    assert solver.flatten(Graph("c")) == []


def test_comparing_needs_siblings() -> None:
    with pytest.raises(ConfigError, match="IPO compares siblings: set tree_width to 2 or more"):
        IPO(Table()).flatten(tree(0.5))


@pytest.mark.parametrize("kind", [DPO, IPO])
def test_preference_losses_are_the_published_formulas(kind: Any) -> None:
    system, beta = Table(), 0.3
    solver = kind(system, beta=beta)
    batch = solver.collate_fn([*solver.flatten(tree(0.2, 0.9)), *solver.flatten(tree(0.2, 0.1, 0.3))])
    loss, logs = solver.step(batch)
    policy, reference = system.weights.detach().numpy().sum(1), system.baseline.numpy().sum(1)
    margins = np.array([(policy[a] - policy[b]) - (reference[a] - reference[b]) for a, b in ((1, 0), (2, 1))])
    each = np.log1p(np.exp(-beta * margins)) if kind is DPO else (margins - 1 / (2 * beta)) ** 2
    assert loss.item() == pytest.approx(each.mean(), rel=1e-6)
    assert float(logs["reward/margin"]) == pytest.approx(beta * margins.mean(), rel=1e-5)
    assert float(logs["reward/accuracies"]) == (margins > 0).mean()
    assert not any(isinstance(value, Tensor) and value.requires_grad for value in logs.values())
    slope = -beta / (1 + np.exp(beta * margins)) if kind is DPO else 2 * (margins - 1 / (2 * beta))
    loss.backward()
    assert system.weights.grad is not None
    assert system.weights.grad[0].tolist() == pytest.approx([-slope[0] / 2] * 2, rel=1e-5)


def test_a_turn_in_several_pairs_is_computed_once_and_counts_in_each() -> None:
    asked: list[int] = []

    class Counting(Table):
        def auditor_logprobs(self, contexts: Any, probes: Any) -> Tensor:
            asked.append(len(probes))
            return super().auditor_logprobs(contexts, probes)

    together, apart = Counting(), Counting()
    pairs = DPO(together, pairs="all").flatten(tree(0.2, 0.9, 0.1))
    loss, _ = DPO(together).step(DPO.collate_fn(pairs))
    each = torch.stack([DPO(apart).step(DPO.collate_fn([pair]))[0] for pair in pairs]).mean()
    assert asked == [3, 2, 2, 2]
    assert loss.item() == pytest.approx(each.item(), rel=1e-6)
    loss.backward(), each.backward()
    assert together.weights.grad is not None and apart.weights.grad is not None
    assert torch.allclose(together.weights.grad, apart.weights.grad, rtol=1e-5, atol=0)


def test_the_same_probe_of_another_context_is_another_turn() -> None:
    asked: list[tuple[Any, ...]] = []

    class Recording(Table):
        def auditor_logprobs(self, contexts: Any, probes: Any) -> Tensor:
            asked.extend(zip(contexts, probes, strict=True))
            return self.weights[[len(probe) for probe in probes]]

        def baseline_logprobs(self, contexts: Any, probes: Any) -> Tensor:
            return self.baseline[[len(probe) for probe in probes]]

    batch = {"context": [[7], [7], [8]], "chosen": [[1], [1], [1]], "rejected": [[1, 2], [1, 2], []]}
    DPO(Recording()).step({**batch, "chosen_reward": [1.0] * 3, "rejected_reward": [0.0] * 3})
    assert asked == [([7], [1]), ([8], [1]), ([7], [1, 2]), ([8], [])]


def test_credit_can_come_from_the_turns_that_follow() -> None:
    node = Node("c", "p", "r", 1.0, [Node("d", "q", "r", 2.0), Node("d", "s", "r", 4.0)])
    assert DPO(Table()).worth(node) == 1.0
    assert DPO(Table(), credit="best", gamma=0.5).worth(node) == 3.0
    assert PPO(Table(), credit="mean", gamma=0.5).worth(node) == 2.5


# ---- PPO -------------------------------------------------------------------------------------------------------------


def ppo_batch(old: list[list[float]]) -> dict[str, Any]:
    return {"context": ["c"] * 3, "probe": ["0", "1", "2"], "logprobs": old, "reward": [1.0, -1.0, 0.5]}


OLD = [[-1.3, -1.5], [-0.4, -0.6], [-2.0]]


@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_ppo_is_the_published_formula_over_the_tokens_there_are(clip: float) -> None:
    system = Table()
    loss, logs = PPO(system, clip_range=clip, vf_loss_coef=0.7, whiten=False).step(ppo_batch(OLD))
    now, values = system.weights.detach().numpy(), system.values.detach().numpy()
    surrogates, errors = [], []
    for row, reward in enumerate((1.0, -1.0, 0.5)):
        for token, old in enumerate(OLD[row]):
            ratio, advantage = np.exp(now[row, token] - old), reward - values[row, token]
            surrogates.append(-min(ratio * advantage, np.clip(ratio, 1 - clip, 1 + clip) * advantage))
            errors.append((values[row, token] - reward) ** 2 / 2)
    assert len(surrogates) == 5, "padding has no part"
    assert loss.item() == pytest.approx(np.mean(surrogates) + 0.7 * np.mean(errors), rel=1e-5)
    assert float(logs["policy_loss"]) == pytest.approx(np.mean(surrogates), rel=1e-5)
    loss.backward()
    assert system.weights.grad is not None and system.values.grad is not None
    assert system.weights.grad[2, 1] == 0 and system.values.grad[2, 1] == 0
    assert system.values.grad[:2].all(), "values are trained"


def test_clip_range_is_honoured() -> None:
    wide, narrow = (PPO(Table(), clip_range=clip, whiten=False).step(ppo_batch(OLD))[1] for clip in (5.0, 0.01))
    assert float(wide["clipped"]) == 0 and float(narrow["clipped"]) > 0


def test_padding_changes_neither_whitened_advantages_nor_the_loss() -> None:
    short, long = Table(), Table()
    with torch.no_grad():
        long.values = torch.cat([long.values.detach(), torch.full((3, 4), 7.0)], 1).requires_grad_()
        long.weights = torch.cat([long.weights.detach(), torch.full((3, 4), -9.0)], 1).requires_grad_()
    found = []
    for system in (short, long):
        loss, _ = PPO(system).step(ppo_batch(OLD))
        loss.backward()
        found.append((loss.detach(), system.weights.grad[:, :2]))  # type: ignore[index]
    torch.testing.assert_close(*found)


def test_a_conversation_of_width_one_gives_every_turn() -> None:
    sampler = make_sampler(width=1, depth=3)
    samples = PPO(sampler.system).flatten(sampler.rollout(0))
    assert len(samples) == 3
    loss, _ = PPO(sampler.system).step(PPO.collate_fn(samples))
    assert torch.isfinite(loss)
    assert len(PPO(sampler.system, epochs=3).flatten(sampler.rollout(0))) == 9


def test_the_ratio_is_to_the_auditor_that_sampled_not_to_the_baseline() -> None:
    sampler = make_sampler(width=2, depth=1, baseline=tiny(9))
    solver = PPO(sampler.system)
    batch = solver.collate_fn(solver.flatten(sampler.rollout(0)))
    assert float(solver.step(batch)[1]["ratio"]) == pytest.approx(1.0, abs=1e-5)
    with torch.no_grad():
        for parameter in sampler.system.auditor.parameters():
            parameter.mul_(1.5)
    assert float(solver.step(batch)[1]["ratio"]) != pytest.approx(1.0, abs=1e-3), "once the auditor has moved"


def test_log_probabilities_that_were_not_kept_are_taken_before_learning() -> None:
    sampler = make_sampler(width=2, depth=2)
    graph = sampler.rollout(0)
    solver = PPO(sampler.system)
    samples = solver.flatten(graph)
    kept, sampled = [one["logprobs"] for one in samples], [one["probe"] for one in samples]
    for node in graph.nodes():
        del node.extra["auditor"]
    plain = solver.flatten(graph)
    assert [sample["probe"] for sample in plain] == [node.probe for node in graph.nodes()]
    # Probes whose text says it all; an end token, for one, is not part of it.
    whole = [at for at, tokens in enumerate(sampled) if tokens == sampler.system.auditor.encode(plain[at]["probe"])]
    assert whole
    for at in whole:
        assert plain[at]["logprobs"] == pytest.approx(kept[at], abs=1e-5)


def test_the_value_head_learns_with_the_auditor() -> None:
    sampler = make_sampler()
    solver = PPO(sampler.system, kl_coef=0.1)
    loss, logs = solver.step(solver.collate_fn(solver.flatten(sampler.rollout(0))))
    loss.backward()
    head = sampler.system.auditor.value_head
    assert head is not None and head.weight.grad is not None and head.weight.grad.any()
    assert any(p is head.weight for p in sampler.system.parameters())
    assert float(logs["kl"]) == pytest.approx(0.0, abs=1e-9)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="PPO needs values"):
        PPO(make_system(auditor=tiny(0)))
    for wrong in ({"clip_range": 0.0}, {"credit": "all"}, {"gamma": 2.0}):
        with pytest.raises(ConfigError):
            PPO(Table(), **wrong)
    for wrong in ({"beta": 0.0}, {"pairs": "some"}):
        with pytest.raises(ConfigError):
            DPO(Table(), **wrong)
