"""PushT: push a T-shaped block onto its outline with a round finger."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.simulation.environments.base import Array, Observation
from etude.simulation.environments.gym import GymEnvironment
from etude.simulation.environments.pusht_planner import PushTPlanner
from etude.types import DataSpec
from etude.types.names import ACTION, ENVIRONMENT_STATE, STATE

_OBSERVATIONS = {
    "keypoints": "environment_state_agent_pos",
    "pose": "state",
    "pixels": "pixels_agent_pos",
}
FINGER_NAMES = ("finger_x", "finger_y")
CORNER_NAMES = tuple(f"corner_{number}_{axis}" for number in range(8) for axis in "xy")
"""0 to 3 are those of the bar, 4 to 7 of the stem; 0 and 1, 2 and 3, 4 and 5, 6 and 7 lie left and right."""
TARGET_NAMES = ("target_x", "target_y")


class PushT(GymEnvironment):
    """gym-pusht: actions are where the finger is to go, in pixels of a 512 x 512 table, ten times a second.

    Success is a block that covers more than 95 % of its outline. Its expert is a planner (`pusht_planner`).

    Args:
        observe: keypoints (8 corners of the block as environment state, the finger as state), pose (finger, block
            and angle in 5 numbers of state), or pixels (a picture, and the finger as state).
        size: Height and width of the observed picture, in pixels.
        max_steps: Steps before an episode is truncated.
        render_size: Height and width of the pictures for people.
    """

    start_size = 5

    @classmethod
    def options_for(cls, spec: DataSpec) -> dict[str, Any]:
        """Return the options with which the environment shows what a policy was trained to see."""
        if images := spec.with_role("image"):
            return {"observe": "pixels", "size": max(next(iter(images.values())).shape)}
        return {"observe": "keypoints" if spec.with_role("environment") else "pose"}

    def __init__(
        self,
        observe: Literal["keypoints", "pose", "pixels"] = "keypoints",
        size: int = 96,
        max_steps: int = 300,
        render_size: int = 256,
    ) -> None:
        if observe not in _OBSERVATIONS:
            raise ConfigError(f"pusht observes one of {', '.join(_OBSERVATIONS)}, got {observe!r}")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it greets on standard output
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_extra("gym_pusht", "sim")  # registers its ids
        sizes = {"observation_height": size, "observation_width": size}
        shown = {"visualization_height": render_size, "visualization_width": render_size}
        super().__init__(
            "gym_pusht/PushT-v0",
            task="Push the T-shaped block onto the T-shaped target",
            max_steps=max_steps,
            options={"obs_type": _OBSERVATIONS[observe], **sizes, **shown},
        )
        state = (*FINGER_NAMES, "block_x", "block_y", "block_angle") if observe == "pose" else FINGER_NAMES
        names = {STATE: state, ENVIRONMENT_STATE: CORNER_NAMES, ACTION: TARGET_NAMES}
        features = {key: replace(one, names=names.get(key)) for key, one in self.spec.features.items()}
        self.spec = DataSpec(features, self.fps)
        self._planner: PushTPlanner | None = None

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed."""
        if self._planner is not None:
            self._planner.reset()
        return super().reset(seed)

    def reset_at(self, seed: int, start: Array) -> Observation:
        """Begin with finger, block and angle between the ends of what seeds draw."""
        low, high = np.array([50.0, 50.0, 100.0, 100.0, -np.pi]), np.array([450.0, 450.0, 400.0, 400.0, np.pi])
        self._start = {"reset_to_state": low + np.clip(start, 0.0, 1.0) * (high - low)}
        try:
            return self.reset(seed)
        finally:
            self._start = None

    def scene(self) -> dict[str, float]:
        """Return where finger and block are, in pixels, whatever of it is observed."""
        scene = self._env.unwrapped
        (agent_x, agent_y), (block_x, block_y) = scene.agent.position, scene.block.position
        angle = float(scene.block.angle)
        return {"agent_x": agent_x, "agent_y": agent_y, "block_x": block_x, "block_y": block_y, "block_angle": angle}

    def expert_action(self) -> Array:
        """Return where the planner wants the finger to go now. It carries a plan from step to step."""
        scene = self._env.unwrapped
        if self._planner is None:
            self._planner = PushTPlanner(scene.goal_pose)
        block = (*scene.block.position, scene.block.angle)
        return self._planner.act(tuple(scene.agent.position), block, tuple(scene.agent.velocity))
