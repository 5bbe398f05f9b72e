"""ALOHA in simulation: two arms that hand over a cube, or put a peg into a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.reading.suggest import did_you_mean
from etude.simulation.environments.base import Array, Observation, StepOutcome
from etude.simulation.environments.rendering import (
    CameraRenderer,
    prepare_mujoco,
    quicken_rendering,
    require_rendering,
)
from etude.types import DataSpec, Feature
from etude.types.names import ACTION, ENVIRONMENT_STATE, STATE, image_name

FPS = 50.0
CAMERAS = ("top", "angle", "front_close")
TASKS = {
    "insertion": "Insert the peg into the socket",
    "transfer-cube": "Pick up the cube with the right arm and transfer it to the left arm",
}
_JOINTS = 14


class Aloha:
    """gym-aloha: 14 joint positions of two arms as state and as action, where things lie as environment state.

    Args:
        task: transfer-cube or insertion.
        cameras: Cameras to observe: top, angle, front_close.
        height: Height of the observed pictures, in pixels.
        width: Width of the observed pictures, in pixels.
        max_steps: Steps before an episode is truncated.
        quick: Render without shadows, reflections and multisampling; false looks like recordings made elsewhere.
        render_height: Height of the pictures for people.
        render_width: Width of the pictures for people.
    """

    fps = FPS

    def __init__(
        self,
        task: str = "transfer-cube",
        cameras: Sequence[str] = (),
        height: int = 480,
        width: int = 640,
        max_steps: int = 300,
        quick: bool = True,
        render_height: int = 240,
        render_width: int = 320,
    ) -> None:
        self.name = task.replace("_", "-")
        if self.name not in TASKS:
            near = did_you_mean(self.name, TASKS)
            raise ConfigError(f"aloha has no task {task!r}{near or ';'} It has {', '.join(TASKS)}")
        for camera in cameras:
            if camera not in CAMERAS:
                raise ConfigError(f"aloha has no camera {camera!r}; it has {', '.join(CAMERAS)}")
        self.task = TASKS[self.name]
        self.cameras, self.max_steps = tuple(cameras), max_steps
        prepare_mujoco()
        if self.cameras:
            require_rendering()
        self._env = _make(self.name.replace("-", "_"))
        physics = self._env._env.physics
        # MuJoCo's own objects: the renderer of dm_control complains when Python ends and its display is gone.
        model, self._data = physics.model.ptr, physics.data.ptr
        if quick:
            quicken_rendering(model)
        self._eye = CameraRenderer(model, height, width)
        self._screen = CameraRenderer(model, render_height, render_width)
        # The package renders three pictures of 480 x 640 for every observation, whatever is asked of it.
        self._env._env.task.get_observation = self._observe_joints
        self._env._format_raw_obs = lambda raw: raw
        self._steps = 0
        things = len(physics.data.qpos) - 16
        features = {
            STATE: Feature((_JOINTS,), "float32", "state"),
            ENVIRONMENT_STATE: Feature((things,), "float32", "environment"),
        }
        features |= {image_name(camera): Feature((height, width, 3), "uint8", "image") for camera in self.cameras}
        features[ACTION] = Feature((_JOINTS,), "float32", "action")
        self.spec = DataSpec(features, FPS)

    @classmethod
    def options_for(cls, spec: DataSpec) -> dict[str, Any]:
        """Return the options with which the environment shows what a policy was trained to see."""
        images = spec.with_role("image")
        sizes = {tuple(size for size in feature.shape if size != 3) for feature in images.values()}
        if len(sizes) != 1:
            return {}
        height, width = sizes.pop()
        return {"cameras": [name.removeprefix(image_name("")) for name in images], "height": height, "width": width}

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed."""
        self._steps = 0
        seen, _ = self._env.reset(seed=seed)
        return self._observe(seen)

    def step(self, action: Array) -> StepOutcome:
        """Set the joints to go to."""
        seen, reward, terminated, _, info = self._env.step(np.asarray(action, np.float64).reshape(_JOINTS))
        self._steps += 1
        success = bool(info["is_success"])
        late = self._steps >= self.max_steps and not terminated
        return StepOutcome(self._observe(seen), float(reward or 0.0), bool(terminated), late, success, info)

    def _observe_joints(self, physics: Any) -> dict[str, Array]:
        task = self._env._env.task
        return {STATE: task.get_qpos(physics), ENVIRONMENT_STATE: task.get_env_state(physics)}

    def _observe(self, seen: dict[str, Array]) -> Observation:
        observation = {name: values.astype(np.float32) for name, values in seen.items()}
        for camera in self.cameras:
            observation[image_name(camera)] = self._eye.render(self._data, camera)
        return observation

    def render(self) -> Array:
        """Return a picture of the scene for people."""
        return self._screen.render(self._data, "top")

    def close(self) -> None:
        """Release the OpenGL contexts."""
        self._eye.close()
        self._screen.close()


def _make(task: str) -> Any:
    return import_extra("gym_aloha.env", "sim").AlohaEnv(task)
