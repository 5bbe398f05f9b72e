"""Trees are grown level by level, in one batch, as the seed says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.policies.language.model import LanguageModel
from etude.redteam.ast_system import ASTSystem
from etude.redteam.sampler import ASTSampler, Tip
from etude.rollouts.graph import Node
from tests.unit.redteam.tiny_models import PROMPTS, Share, make_sampler, texts


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many completions each call of `generate` made."""
    found: list[int] = []
    original = LanguageModel.generate

    def generate(self: LanguageModel, prompts: Any, sampling: Any, *, n: int = 1, keys: Any = None) -> Any:
        found.append(len(prompts) * n)
        return original(self, prompts, sampling, n=n, keys=keys)

    monkeypatch.setattr(LanguageModel, "generate", generate)
    return found


def test_a_tree_takes_one_pair_of_calls_per_level_however_many_are_grown(generations: list[int]) -> None:
    graphs = make_sampler(width=2, depth=3).rollouts(range(5))
    assert [len(list(graph.nodes())) for graph in graphs] == [14] * 5
    assert generations == [10, 10, 20, 20, 40, 40]


def test_every_text_of_a_level_is_scored_in_one_call() -> None:
    scorer = Share()
    make_sampler(width=2, depth=3, scorer=scorer).rollouts([0, 1])
    assert [len(call) for call in scorer.calls] == [8, 16, 32]


def test_siblings_share_a_context_that_grows_by_what_was_said() -> None:
    graph = make_sampler(width=3, depth=2).rollout(7)
    for group in graph.groups():
        assert len(group) == 3
        assert len({node.context for node in group}) == 1
        assert len({node.probe for node in group}) > 1
    for node in graph.children:
        assert node.children[0].context == node.context + node.probe + node.response


def test_the_seed_decides_prompt_and_words_and_nought_is_a_seed() -> None:
    sampler = make_sampler()
    torch.manual_seed(1)
    first = [texts(sampler.rollout(seed)) for seed in range(6)]
    torch.manual_seed(2)
    assert [texts(sampler.rollout(seed)) for seed in range(6)] == first
    assert len({str(found) for found in first}) == 6
    assert len({sampler.choose_prompt(seed) for seed in range(40)}) == len(PROMPTS)
    same = [seed for seed in range(40) if sampler.choose_prompt(seed) == sampler.choose_prompt(0)]
    assert texts(sampler.rollout(same[0])) != texts(sampler.rollout(same[1]))


def test_a_tree_does_not_depend_on_those_grown_with_it() -> None:
    sampler = make_sampler()
    together = sampler.rollouts([3, 1, 4])
    assert [texts(graph) for graph in together] == [texts(sampler.rollout(seed)) for seed in (3, 1, 4)]


def test_without_a_seed_one_is_drawn() -> None:
    sampler = make_sampler()
    np.random.seed(0)
    assert texts(sampler.rollout()) != texts(sampler.rollout())


def test_evaluation_holds_conversations_from_seeds_or_prompts() -> None:
    sampler = make_sampler(width=3, depth=3)
    graph = sampler.eval_rollout("a cage")
    assert graph.context == "a cage"
    assert [len(level) for level in graph.levels()] == [1, 1, 1]
    assert sampler.eval_rollout(0).context == sampler.choose_prompt(0)
    together = sampler.eval_rollouts(["a cage", "a hedge", 0])
    assert [texts(graph) for graph in together] == [texts(sampler.eval_rollout(s)) for s in ("a cage", "a hedge", 0)]
    assert texts(sampler.eval_rollouts(["a cage"], seed=1)[0]) != texts(graph)


def test_growing_can_be_overridden() -> None:
    class Narrowing(ASTSampler):
        def grow_level(self, tips: Sequence[Tip], width: int) -> list[Tip]:
            grown = super().grow_level(tips, width)
            best: dict[int, Tip] = {id(tip.children): tip for tip in grown}
            return list(best.values())[:1]

    sampler = make_sampler()
    narrow = Narrowing(sampler.system, PROMPTS, tree_width=3, tree_depth=4)
    assert [len(level) for level in narrow.rollout(0).levels()] == [3, 3, 3, 3]

    class Stump(ASTSampler):
        def grow(self, graphs: Any, keys: Any, width: int, depth: int) -> None:
            for graph in graphs:
                graph.children.append(Node(graph.context, "p", "r", 1.0))

    assert texts(Stump(sampler.system, PROMPTS).rollout(0))[0][1:] == ("p", "r")


@pytest.mark.parametrize("prompts, width, depth", [([], 2, 2), (["a"], 0, 2), (["a"], 2, 0)])
def test_shapes_that_cannot_be_are_refused(prompts: list[str], width: int, depth: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        ASTSampler(make_sampler().system, prompts, width, depth)


class Echo(ASTSystem):
    """A system without tokens: the auditor draws letters from torch's generator, the target repeats the last."""

    def __init__(self, **reward: float) -> None:
        super().__init__(Share("b"), **reward)
        self.auditor = nn.Linear(1, 3)

    def get_tester_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        rows = self.auditor(torch.tensor([[float(len(c))] for c in context])).log_softmax(1)
        return rows.gather(1, torch.tensor([["abc".index(c)] for c in continuation]))

    def get_target_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        return torch.tensor([[0.5, 0.125, 1.0] for _ in continuation]).log()  # the third is padding

    def get_baseline_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        return torch.full((len(context), 1), -1.1)

    def rollout_prompt_with_tester(self, x: Sequence[Any]) -> Sequence[str]:
        return ["abc"[int(i)] for i in torch.randint(3, (len(x),))]

    def rollout_prompt_with_target(self, x: Sequence[Any]) -> Sequence[str]:
        return [text[-1] for text in x]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.auditor.parameters()


def test_a_system_that_knows_no_tokens_grows_trees_too() -> None:
    sampler = ASTSampler(Echo(likelihood_weight=0.0), ["x"], 3, 2)
    torch.manual_seed(0)
    graph = sampler.rollout(5)
    state = torch.get_rng_state()
    assert texts(sampler.rollout(5)) == texts(graph)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left as it was"
    assert texts(sampler.rollout(6)) != texts(graph)
    for node in graph.nodes():
        assert node.response == node.probe
        assert node.reward == pytest.approx(0.2 * (node.probe == "b"))


def test_the_likelihood_of_a_system_without_tokens_leaves_padding_out() -> None:
    system = Echo(combined_weight=0.0, response_weight=0.0, likelihood_weight=1.0)
    ((reward, parts),) = system.assess(["x"], ["a"], ["a"])
    assert parts["perplexity"] == pytest.approx(4.0), "the geometric mean of 1/2 and 1/8 is 1/4"
    assert reward == pytest.approx(-1.3862944)


def test_a_score_that_is_no_number_fails_the_rollout() -> None:
    class Broken(Share):
        def score(self, texts: Sequence[str]) -> list[float]:
            return [float("nan")] * len(texts)

    with pytest.raises(ValueError, match="scorer returned nan"):
        make_sampler(scorer=Broken()).rollout(0)
