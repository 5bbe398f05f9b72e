"""A robot of a few lines, whose failures are known: a cart is to pass a gate, and misses it if it is pushed aside."""

from __future__ import annotations

from typing import Any

import numpy as np

from etude.simulation.environments.base import Array, Observation, StepOutcome
from etude.types import DataSpec, Feature
from etude.types.names import ACTION, STATE

STEPS = 20


class NarrowGate:
    """Drive from x 0 to 1 in twenty steps and pass at |y| < width; the action is how fast y changes.

    Args:
        width: Half the width of the gate.
        max_steps: Steps before an episode is truncated.
        task: What is to be done, in words.
    """

    fps = 10.0
    start_size = 1

    def __init__(self, width: float = 0.6, max_steps: int = STEPS, task: str = "Pass the gate") -> None:
        self.width, self.max_steps, self.task = width, max_steps, task
        state, action = Feature((2,), "float32", "state", names=("cart_x", "cart_y")), (2,)
        self.spec = DataSpec({STATE: state, ACTION: Feature(action, "float32", "action", names=("up", "idle"))}, 10.0)

    def reset(self, seed: int) -> Observation:
        return self.reset_at(seed, np.random.default_rng(seed).random(1))

    def reset_at(self, seed: int, start: Array) -> Observation:
        self.x, self.y = 0.0, float(start[0]) - 0.5
        return self._seen()

    def step(self, action: Array) -> StepOutcome:
        self.x += 1.0 / STEPS
        self.y += 0.1 * float(action[0])
        done = self.x >= 1.0 - 1e-9
        passed = done and abs(self.y) < self.width
        return StepOutcome(self._seen(), 1.0 - abs(self.y), done, False, passed, {})

    def expert_action(self) -> Array:
        return np.array([np.clip(-5 * self.y, -3, 3), 0.0], np.float32)

    def scene(self) -> dict[str, float]:
        return {"cart_x": self.x + self.y, "cart_y": self.y}

    def _seen(self) -> Observation:
        return {STATE: np.array([self.x, self.y], np.float32)}

    def render(self) -> Array:
        picture = np.zeros((16, 16, 3), np.uint8)
        picture[min(15, max(0, round(8 + 8 * self.y)))] = 255
        return picture

    def close(self) -> None:
        pass


def lazy(observation: Observation) -> Any:
    """Go straight on, whatever happens: a push that lasts is never made good."""
    return np.zeros(2, np.float32)
