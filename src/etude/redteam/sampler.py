"""`ASTSampler`: grows trees of turns level by level, all siblings and all episodes in one batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import ConfigError
from etude.redteam.ast_system import Utterance, speak
from etude.redteam.prompts import as_prompts
from etude.rng import fold
from etude.rollouts.graph import Graph, Node, Sampler
from etude.rollouts.system import System

_PROMPT, _PROBE, _RESPONSE, _EVALUATE = 1, 2, 3, 4


@dataclass(slots=True)
class Tip:
    """Where a tree can grow: a context, the list its turns go into, and the name of its random stream."""

    context: Any
    children: list[Node]
    key: int


class ASTSampler(Sampler):
    """Grows trees of probes and responses from prompts.

    A tree of width w and depth d has w + w^2 + ... + w^d turns and takes d pairs of calls to the models, however many
    trees are grown at once. The seed decides the prompt and everything that is said; 0 is a seed like any other.
    """

    def __init__(self, system: System, prompts: Sequence[Any], tree_width: int = 2, tree_depth: int = 3) -> None:
        """Choose prompts and the shape of the trees.

        Args:
            system: The models and the reward.
            prompts: What conversations begin with.
            tree_width: Probes tried on each context.
            tree_depth: Turns of a conversation.
        """
        super().__init__(system)
        self.prompts = as_prompts(prompts)
        self.tree_width, self.tree_depth = tree_width, tree_depth
        if not self.prompts:
            raise ConfigError("ASTSampler needs at least one prompt")
        sizes: list[Any] = [tree_width, tree_depth]
        if not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ConfigError(
                f"tree_width and tree_depth must be whole numbers from 1, at least 1 each, got {tree_width!r} and "
                f"{tree_depth!r}"
            )
        if not hasattr(system, "advance"):
            raise ConfigError(f"ASTSampler needs a System first, got {type(system).__name__}")

    def rollout(self, seed: int | None = None) -> Graph:
        """Return one tree; None draws a seed from NumPy's global generator."""
        return self.rollouts([_drawn() if seed is None else seed])[0]

    def rollouts(self, seeds: Sequence[int]) -> list[Graph]:
        """Return a tree for each seed, grown together."""
        graphs = [Graph(self.choose_prompt(seed)) for seed in seeds]
        self.grow(graphs, [fold(seed) for seed in seeds], self.tree_width, self.tree_depth)
        remember = getattr(self.system, "remember", None)
        if remember is not None:
            remember(graphs)
        return graphs

    def choose_prompt(self, seed: int) -> Any:
        """Return the prompt that belongs to a seed."""
        return self.prompts[fold(seed, _PROMPT) % len(self.prompts)]

    def eval_rollout(self, seed: Any = None) -> Graph:
        """Return one conversation, that is a tree of width 1, from a seed or from a prompt."""
        return self.eval_rollouts([_drawn() if seed is None else seed])[0]

    def eval_rollouts(self, seeds: Sequence[Any], seed: int = 0) -> list[Graph]:
        """Return a conversation for each seed or prompt, held together; `seed` tells sets of them apart."""
        graphs, keys = [], []
        for given in seeds:
            is_seed = isinstance(given, int)
            graphs.append(Graph(self.choose_prompt(given) if is_seed else given))
            keys.append(fold(_EVALUATE, seed, given if is_seed else zlib.crc32(repr(given).encode())))
        self.grow(graphs, keys, 1, self.tree_depth)
        return graphs

    def grow(self, graphs: Sequence[Graph], keys: Sequence[int], width: int, depth: int) -> None:
        """Grow trees from their prompts to the given depth. Override to grow them otherwise."""
        tips = [Tip(graph.context, graph.children, key) for graph, key in zip(graphs, keys, strict=True)]
        done, total = 0, len(tips) * sum(width**level for level in range(1, depth + 1))
        for _ in range(depth):
            tips = self.grow_level(tips, width)
            done += len(tips)
            self.tell("turns", done, total)

    def grow_level(self, tips: Sequence[Tip], width: int) -> list[Tip]:
        """Add `width` turns to every tip, and return the new tips. Override to change what a turn is."""
        contexts = [tip.context for tip in tips for _ in range(width)]
        keys = [fold(tip.key, index) for tip in tips for index in range(width)]
        said = self._speak("auditor", [tip.context for tip in tips], [fold(tip.key, _PROBE) for tip in tips], width)
        probes = [probe for group in said for probe in group]
        heard = self._speak(
            "target",
            [_joined(context, probe.text) for context, probe in zip(contexts, probes, strict=True)],
            [fold(key, _RESPONSE) for key in keys],
            1,
        )
        responses = [group[0] for group in heard]
        nodes = self._nodes(contexts, probes, responses)
        grown = []
        for at, node in enumerate(nodes):
            tips[at // width].children.append(node)
            grown.append(Tip(self.system.advance(node.context, node.probe, node.response), node.children, keys[at]))
        return grown

    def _speak(self, who: Any, contexts: Sequence[Any], keys: Sequence[int], n: int) -> list[list[Utterance]]:
        own = getattr(self.system, "speak", None)
        return speak(self.system, who, contexts, keys, n) if own is None else own(who, contexts, keys, n)

    def _nodes(
        self, contexts: Sequence[Any], probes: Sequence[Utterance], responses: Sequence[Utterance]
    ) -> list[Node]:
        texts = [probe.text for probe in probes], [response.text for response in responses]
        assess = getattr(self.system, "assess", None)
        judged: list[tuple[float, dict[str, float]]]
        if assess is None:
            judged = [(float(reward), {}) for reward in self.system.reward(contexts, *texts)]
        else:
            judged = assess(contexts, *texts)
        nodes = []
        for context, probe, response, (reward, parts) in zip(contexts, probes, responses, judged, strict=True):
            extra: dict[str, Any] = {**parts}
            extra |= {who: one.extra for who, one in (("auditor", probe), ("target", response)) if one.extra}
            nodes.append(Node(context, probe.text, response.text, float(reward), extra=extra))
        return nodes


def _joined(context: Any, probe: Any) -> Any:
    """Return what the target answers to. Texts and tokens are joined; a system of other things sees the probe alone."""
    return context + probe if isinstance(context, str | list | tuple) else probe


def _drawn() -> int:
    return int(np.random.randint(2**31))
