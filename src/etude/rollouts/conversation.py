"""Conversations: environments that answer, turn by turn, and what a rollout keeps of them.

All conversations that are still going take their next turn in one call of `generate`. Tokens are kept as they were
sampled; what the environment says is encoded once and carries no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from etude.rollouts.tasks import Task


@dataclass(frozen=True)
class Turn:
    """What an environment makes of a completion."""

    reply: str = ""
    """What it says next; empty with `done`."""
    reward: float = 0.0
    done: bool = False


@runtime_checkable
class Conversation(Protocol):
    """One conversation of an environment; made anew for every rollout by calling its class with the task."""

    def respond(self, text: str) -> Turn:
        """Answer a completion."""


@dataclass
class Rollout:
    """One completion, or one conversation, as tokens."""

    task: Task
    key: int
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    group: str
    index: int
    text: str = ""
    """The last completion."""
    finish_reason: str = "stop"
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    greedy_reward: float | None = None
    """What the likeliest completion of the same prompt earned, where an algorithm compares with it."""
    turns: int = 0
    partner: Any = None

    def add(self, completion: Any) -> None:
        """Append a sampled completion."""
        self.tokens += completion.tokens
        self.loss_mask += [1] * len(completion.tokens)
        if completion.logprobs is None or len(completion.logprobs) != len(completion.tokens):
            self.logprobs = None  # not known, or not of these tokens
        elif self.logprobs is not None:
            self.logprobs += completion.logprobs
        self.text, self.finish_reason, self.turns = completion.text, completion.finish_reason, self.turns + 1

    def hear(self, tokens: Sequence[int]) -> None:
        """Append what somebody else said."""
        self.tokens += tokens
        self.loss_mask += [0] * len(tokens)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(tokens)
