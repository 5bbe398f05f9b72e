"""What happens in episodes, written down step by step; what is not finite, raises or takes too long is a failure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor

from etude.errors import RolloutError
from etude.rollouts.rewards import MOST_HUNG
from etude.simulation.actors import Seat, is_finite
from etude.simulation.environments import make_environment
from etude.simulation.environments.base import Array, Environment, Observation, StepOutcome
from etude.simulation.episodes import EnvironmentPool, Job
from etude.simulation.timed import TimedEnvironment

OnError = Literal["drop", "stop"]


@dataclass
class Diary:
    """What happened in one episode so far."""

    seen: list[dict[str, Tensor]] = field(default_factory=list)
    """One more than there are actions: the last is what they led to."""
    actions: list[Array] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    """What the actor had to say about each step."""
    rewards: list[float] = field(default_factory=list)
    successes: list[bool | None] = field(default_factory=list)
    """Whether the task was done at each step."""
    terminated: bool = False


class Diaries:
    """Keeps the diary of every episode; a witness of an `EpisodeRunner`.

    Args:
        tensors: What to keep of an observation.
        note: What the actor has to say about the step it has just taken.
        on_error: What to do when an episode fails: drop it, or stop.
    """

    def __init__(
        self, tensors: Callable[[Seat], dict[str, Tensor]], note: Callable[[Seat], Any], on_error: OnError = "drop"
    ) -> None:
        self._tensors, self._note, self._on_error = tensors, note, on_error
        self.diaries: dict[int, Diary] = {}
        self.failures: dict[int, str] = {}
        """Why episodes failed, by number."""
        self.hung = 0

    def began(self, job: Job, env: Environment, observation: Observation) -> None:
        """Refuse what is not finite."""
        _require_finite(observation)

    def saw(self, job: Job, seat: Seat, action: Array, outcome: StepOutcome) -> None:
        """Write a step down."""
        if not math.isfinite(outcome.reward):
            raise ValueError(f"it gave the reward {outcome.reward}")
        _require_finite(outcome.observation)
        diary = self.diaries.get(job.episode)
        if diary is None:
            diary = self.diaries[job.episode] = Diary([self._tensors(seat)])
        diary.seen.append(self._tensors(Seat(seat.slot, seat.env, outcome.observation, seat.key)))
        diary.actions.append(np.array(action))
        diary.notes.append(self._note(seat))
        diary.rewards.append(float(outcome.reward))
        diary.successes.append(outcome.success)
        diary.terminated = outcome.terminated

    def lost(self, job: Job, error: Exception) -> None:
        """Write down that an episode failed, and why."""
        reason = f"{type(error).__name__}: {error}"
        if self._on_error == "stop":
            raise RolloutError(f"episode {job.episode} of {job.env} failed: {reason}") from error
        self.diaries.pop(job.episode, None)
        self.failures[job.episode] = reason
        self.hung += isinstance(error, TimeoutError)
        if self.hung > MOST_HUNG:
            raise RolloutError(
                f"{job.env} took longer than its time limit in {self.hung} episodes of a step; mend it, or "
                "give it more time with step_timeout_s"
            ) from error


def _require_finite(observation: Observation) -> None:
    for name, value in observation.items():
        if not is_finite(value):
            raise ValueError(f"it shows {name} that is not finite")


def timed_pool(env: str, options: dict[str, Any] | None, step_timeout_s: float | None) -> EnvironmentPool:
    """Return where simulators come from, with a limit to the seconds that a step may take."""
    make = make_environment if step_timeout_s is None else partial(_make_timed, step_timeout_s)
    return EnvironmentPool({env: options or {}}, make)


def _make_timed(timeout_s: float, name: str, **options: Any) -> Environment:
    return TimedEnvironment(make_environment(name, **options), timeout_s)
