"""Trees of turns: a prompt, the probes tried on it, what each was answered, what it earned, and so on below.

A `Sampler` grows them; algorithms flatten them into samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Node:
    """One turn: the auditor's probe, the target's response, the reward, and the turns that follow."""

    context: Any
    """What had been said before; siblings share it."""
    probe: Any
    response: Any
    reward: float
    children: list[Node] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is known of the turn: sampled tokens, their log-probabilities, scores."""


@dataclass
class Graph:
    """A tree of turns from one prompt."""

    context: Any
    children: list[Node] = field(default_factory=list)

    def levels(self) -> Iterator[list[Node]]:
        """Yield the turns of each depth, siblings together."""
        level = self.children
        while level:
            yield level
            level = [child for node in level for child in node.children]

    def nodes(self) -> Iterator[Node]:
        """Yield every turn, breadth first."""
        for level in self.levels():
            yield from level

    def groups(self) -> Iterator[list[Node]]:
        """Yield the turns that share a context: the children of each turn, breadth first."""
        if self.children:
            yield self.children
        for node in self.nodes():
            if node.children:
                yield node.children


class Sampler(ABC):
    """Makes rollouts of a system. The documents call it an environment too."""

    report: Callable[[str, int, int], None] | None = None
    """Told what is done of how much while rollouts are made: `("rollouts", 3, 8)`."""

    def __init__(self, system: Any) -> None:
        self.system = system

    @abstractmethod
    def rollout(self, seed: int | None = None) -> Graph:
        """Return one tree; the same seed gives the same tree."""

    def rollouts(self, seeds: Sequence[int]) -> list[Graph]:
        """Return one tree for each seed. Samplers that can grow several at once override this."""
        graphs = []
        for seed in seeds:
            graphs.append(self.rollout(seed))
            self.tell("rollouts", len(graphs), len(seeds))
        return graphs

    def tell(self, what: str, done: int, total: int) -> None:
        """Report how far the rollouts have come, if anyone listens."""
        if self.report is not None:
            self.report(what, done, total)

    def eval_rollout(self, seed: Any = None) -> Graph:
        """Return a tree for evaluation: from a seed, or from a prompt where the sampler takes one."""
        if seed is None or isinstance(seed, int):
            return self.rollout(seed)
        raise TypeError(f"{type(self).__name__} evaluates seeds (int); override eval_rollout to take other prompts")
