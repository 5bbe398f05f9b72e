"""Small parts that the tests of red-teaming share: models of 20,000 parameters, and scorers that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.policies.language.model import LanguageModel
from etude.redteam.hf_system import HFASTSystem
from etude.redteam.sampler import ASTSampler
from etude.rollouts.graph import Graph
from etude.rollouts.system import Scorer

LETTERS = "abcdefghij "
PROMPTS = ["a bad cafe", "i hide", "each idea", "dig a big hedge"]


def tiny(seed: int = 0, vocabulary: str = LETTERS, context: int = 64, **options: Any) -> LanguageModel:
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "key_heads": 1, "intermediate_size": 64, "context": context}
    return LanguageModel.tiny(vocabulary, seed=seed, **sizes, **options)


class Share(Scorer):
    """The share of one letter; notes what it was asked."""

    def __init__(self, letter: str = "e") -> None:
        self.letter = letter
        self.calls: list[list[str]] = []

    def score(self, texts: Sequence[str]) -> list[float]:
        self.calls.append(list(texts))
        return [text.count(self.letter) / max(1, len(text)) for text in texts]


def make_system(**options: Any) -> HFASTSystem:
    settings: dict[str, Any] = {
        "scorer": Share(), "auditor_sampling": {"max_new_tokens": 4}, "target_sampling": {"max_new_tokens": 3},
    }  # fmt: skip
    models = {"auditor": tiny(0, value_head=True), "target": tiny(1)}
    return HFASTSystem(**{**models, **settings, **options})


def make_sampler(width: int = 2, depth: int = 2, **options: Any) -> ASTSampler:
    return ASTSampler(make_system(**options), PROMPTS, tree_width=width, tree_depth=depth)


def texts(graph: Graph) -> list[tuple[str, str, str]]:
    return [(node.context, node.probe, node.response) for node in graph.nodes()]
