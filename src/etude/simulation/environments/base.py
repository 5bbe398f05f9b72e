"""What an environment is: one simulator with LeRobot's feature names, in NumPy, without a batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from etude.types import DataSpec

Array = NDArray[Any]
Observation = dict[str, Array]
"""Arrays by feature name; images are uint8 (height, width, 3)."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step of an environment brings about."""

    observation: Observation
    reward: float
    terminated: bool
    """The episode is over by its own rules; for tasks with a goal, because it is reached."""
    truncated: bool
    """The episode is over because its time is up."""
    success: bool | None
    """Whether the task is done at this step; None where the environment has no notion of success."""
    info: Mapping[str, Any]
    """What the simulator says beside that, unchanged."""

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


@runtime_checkable
class Environment(Protocol):
    """One simulator. The whole episode is a function of the seed given to `reset` and of the actions."""

    @property
    def spec(self) -> DataSpec:
        """The features of observations and actions; images have the shape (height, width, 3)."""

    @property
    def fps(self) -> float:
        """Steps in one second of simulated time."""

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""

    @property
    def task(self) -> str:
        """What is to be done, in words."""

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed and return its first observation."""

    def step(self, action: Array) -> StepOutcome:
        """Act, and return what comes of it."""

    def render(self) -> Array:
        """Return a picture of the scene for people, (height, width, 3) uint8."""

    def close(self) -> None:
        """Release what the simulator holds."""


@runtime_checkable
class HasExpert(Protocol):
    """An environment that comes with a demonstrator."""

    def expert_action(self) -> Array:
        """Return what the expert would do now, within the bounds of the action."""


@runtime_checkable
class CanLookAway(Protocol):
    """An environment that need not render what nobody looks at."""

    looks: bool
    """Whether observations have pictures; without them a step costs only what simulating it does."""


@runtime_checkable
class HasScene(Protocol):
    """An environment that can name where things are, whatever of it the policy sees."""

    def scene(self) -> dict[str, float]:
        """Return where things are now, by names such as object_x."""


@runtime_checkable
class CanChooseStart(Protocol):
    """An environment whose episodes can begin where one likes, within what its seeds would draw."""

    start_size: int
    """Numbers from 0 to 1 that say how an episode begins; drawn uniformly, they begin as seeds do."""

    def reset_at(self, seed: int, start: Array) -> Observation:
        """Begin the episode of a seed, but where `start` says."""


def as_image(picture: Any, name: str) -> Array:
    """Take what a simulator renders as uint8 (height, width, 3)."""
    image = np.asarray(picture)
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(f"{name} renders {image.dtype} {image.shape}, and not uint8 (height, width, 3)")
    return np.ascontiguousarray(image)
