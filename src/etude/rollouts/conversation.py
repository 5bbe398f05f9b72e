"""Conversations: environments that answer, turn by turn, and what a trajectory keeps of them.

All conversations that are still going take their next turn in one call of `generate`. Tokens are kept as they were
sampled; what the environment says is encoded once and carries no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from etude.rollouts.tasks import Task
from etude.types.trajectory import Trajectory


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


def begin(task: Task, prompt: Sequence[int], key: int, *, group_id: str, run_id: int) -> Trajectory:
    """Return a rollout of a prompt of which nothing has been sampled yet; its reward is None until it is judged."""
    return Trajectory(
        list(prompt), [0] * len(prompt), None, task=task, key=key, logprobs=[0.0] * len(prompt), group_id=group_id,
        run_id=run_id, task_id=task.id, text="", finish_reason="stop", scores={}, error=None, turns=0,
        data_source=str(task.metadata.get("data_source", "")),
    )  # fmt: skip


def add_completion(rollout: Trajectory, completion: Any) -> None:
    """Append what was sampled; `text` is then the last completion."""
    rollout.tokens += completion.tokens
    rollout.loss_mask += [1] * len(completion.tokens)
    if completion.logprobs is None or len(completion.logprobs) != len(completion.tokens):
        rollout.logprobs = None  # not known, or not of these tokens
    elif rollout.logprobs is not None:
        rollout.logprobs += completion.logprobs
    rollout.text, rollout.finish_reason = completion.text, completion.finish_reason
    rollout.turns += 1


def hear(rollout: Trajectory, tokens: Sequence[int]) -> None:
    """Append what somebody else said."""
    rollout.tokens += tokens
    rollout.loss_mask += [0] * len(tokens)
    if rollout.logprobs is not None:
        rollout.logprobs += [0.0] * len(tokens)
