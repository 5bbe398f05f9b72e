"""A simulator of a few lines: a point is to reach a goal in the plane; it needs nothing but NumPy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from etude.simulation.environments.base import Array, Observation, StepOutcome
from etude.types import DataSpec, Feature
from etude.types.names import ACTION, STATE

FAULTS: dict[str, Any] = {}
"""What goes wrong: `seeds` fail on reset, `blind` ones show NaN; a `kind` of fault `at` a step, `of` some seeds."""


@contextmanager
def faults(**given: Any) -> Iterator[None]:
    """Let something go wrong for a while."""
    FAULTS.update(given)
    try:
        yield
    finally:
        FAULTS.clear()


class PointReach:
    """Move a point by velocities to a goal; the reward is minus the distance that is left.

    Args:
        max_steps: Steps before an episode is truncated.
    """

    fps = 10.0
    task = "Reach the goal"

    def __init__(self, max_steps: int = 20) -> None:
        self.max_steps = max_steps
        self.spec = DataSpec(
            {STATE: Feature((4,), "float32", "state"), ACTION: Feature((2,), "float32", "action")}, self.fps
        )

    def reset(self, seed: int) -> Observation:
        generator = np.random.default_rng(seed)
        self.seed, self.steps = seed, 0
        self.point, self.goal = generator.uniform(-1, 1, 2), generator.uniform(-1, 1, 2)
        if seed in FAULTS.get("seeds", ()):
            raise OSError("the table is broken")
        if seed in FAULTS.get("blind", ()):
            self.point = self.point * np.nan
        return self._seen()

    def step(self, action: Array) -> StepOutcome:
        self.steps += 1
        is_due = FAULTS.get("at") == self.steps and self.seed in FAULTS.get("of", (self.seed,))
        fault = FAULTS["kind"] if is_due else None
        if fault == "raise":
            raise OSError("the arm is broken")
        if fault == "hang":
            time.sleep(30)
        self.point = self.point + 0.2 * np.clip(action, -1, 1)
        left = float(np.linalg.norm(self.point - self.goal))
        reward = float("nan") if fault == "nan" else -left
        done = left < 0.15
        return StepOutcome(self._seen(), reward, done, not done and self.steps >= self.max_steps, done, {})

    def _seen(self) -> Observation:
        return {STATE: np.concatenate([self.point, self.goal - self.point]).astype(np.float32)}

    def render(self) -> Array:
        return np.zeros((8, 8, 3), dtype=np.uint8)

    def close(self) -> None:
        pass
