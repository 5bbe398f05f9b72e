"""Meta-World's 50 tasks of a robot arm, each with a scripted expert.

The goal is part of the observation: the experts look at it, and a policy that cannot see what its demonstrator saw
has nothing to learn from. (The benchmarks for meta-learning hide it; the ones for multi-task learning show it.)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.reading.suggest import did_you_mean
from etude.simulation.environments.base import Array, Observation, StepOutcome
from etude.simulation.environments.metaworld_tasks import CAMERAS, TASKS
from etude.simulation.environments.quick_sawyer import quick_class
from etude.simulation.environments.rendering import CameraRenderer, prepare_mujoco, require_rendering
from etude.types import DataSpec, Feature
from etude.types.names import ACTION, STATE, image_name

FPS = 80.0
_TURNED = {"corner": True, "corner2": True, "corner3": True, "corner4": True}
_AXES = ("x", "y", "z", "qx", "qy", "qz", "qw")
_PARTS = (
    *("hand_x", "hand_y", "hand_z", "gripper"),
    *(f"object_{axis}" for axis in _AXES),
    *(f"second_{axis}" for axis in _AXES),
)
STATE_NAMES = (*_PARTS, *(f"previous_{name}" for name in _PARTS), "goal_x", "goal_y", "goal_z")
_BETWEEN = (("object", "hand"), ("second", "hand"), ("goal", "hand"), ("goal", "object"))
HAND_NAMES = tuple(name for name in STATE_NAMES if name.removeprefix("previous_") in _PARTS[:4])
"""What a robot knows of itself: where its hand is and was; things and goal are for the cameras to see."""
RELATIVE_NAMES = (
    *STATE_NAMES,
    *(f"{one}_from_{other}_{axis}" for one, other in _BETWEEN for axis in "xyz"),
)
"""All of it, and where things and the goal are from the hand, and the goal from the thing: what a hand goes by."""
ACTION_NAMES = ("dx", "dy", "dz", "gripper")
_HAND = [STATE_NAMES.index(name) for name in HAND_NAMES]
_POINTS = {name: STATE_NAMES.index(f"{name}_x") for name in ("hand", "object", "second", "goal")}
_NAMES = {"full": STATE_NAMES, "hand": HAND_NAMES, "relative": RELATIVE_NAMES}


class MetaWorld:
    """One task of Meta-World v3: 39 numbers of state with the goal, 4 numbers of action, cameras if asked for.

    An episode ends with success, or after `max_steps`.

    Args:
        task: Name of the task, such as pick-place; pick-place-v3 means the same.
        cameras: Cameras to observe: corner, corner2, corner3, corner4, topview, behindGripper, gripperPOV.
        size: Height and width of the observed pictures, in pixels.
        state: full (39 numbers: hand, things, their past, and the goal), hand (8 numbers: the hand and its past) or
            relative (51 numbers: full, and where things and goal are from the hand and from each other).
        max_steps: Steps before an episode is truncated.
        render_camera: Camera of the pictures for people.
        render_height: Height of the pictures for people.
        render_width: Width of the pictures for people.
    """

    fps = FPS

    def __init__(
        self,
        task: str,
        cameras: Sequence[str] = (),
        size: int = 96,
        state: Literal["full", "hand", "relative"] = "full",
        max_steps: int = 500,
        render_camera: str = "corner4",
        render_height: int = 240,
        render_width: int = 320,
    ) -> None:
        self.name = require_task(task)
        self.task = TASKS[self.name]
        self.cameras = tuple(cameras)
        self.max_steps = max_steps
        self.looks = True
        if state not in _NAMES:
            raise ConfigError(f"the state of Meta-World is full, hand or relative, got {state!r}")
        self._state, names = state, _NAMES[state]
        for camera in (*self.cameras, render_camera):
            if camera not in CAMERAS:
                near = did_you_mean(camera, CAMERAS)
                raise ConfigError(f"Meta-World has no camera {camera!r}{near or ';'} It has {', '.join(CAMERAS)}")
        prepare_mujoco()
        if self.cameras:
            require_rendering()
        self._env, self._expert = _make(self.name)
        self._env.max_path_length = max_steps
        space = self._env._random_reset_space
        self._free = np.flatnonzero(space.high > space.low)
        self.start_size = len(self._free)
        self._model_at_start = {name: getattr(self._env.model, name).copy() for name in _MOVED}
        self._render_camera = render_camera
        self._eye = CameraRenderer(self._env.model, size, size, _TURNED)
        self._screen = CameraRenderer(self._env.model, render_height, render_width, _TURNED)
        self._raw = np.zeros(len(STATE_NAMES))
        features = {STATE: Feature((len(names),), "float32", "state", names=names)}
        for camera in self.cameras:
            features[image_name(camera)] = Feature((size, size, 3), "uint8", "image")
        features[ACTION] = Feature((len(ACTION_NAMES),), "float32", "action", names=ACTION_NAMES)
        self.spec = DataSpec(features, FPS)

    @classmethod
    def options_for(cls, spec: DataSpec) -> dict[str, Any]:
        """Return the options with which the environment shows what a policy was trained to see."""
        images = spec.with_role("image")
        sizes = {max(feature.shape) for feature in images.values()}
        cameras = [name.removeprefix(image_name("")) for name in images]
        options: dict[str, Any] = {"cameras": cameras, "size": sizes.pop()} if len(sizes) == 1 else {}
        shape = spec[STATE].shape if STATE in spec.features else None
        kinds = [kind for kind, names in _NAMES.items() if kind != "full" and shape == (len(names),)]
        return {**options, "state": kinds[0]} if kinds else options

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed: where things and the goal lie follows from it and from nothing else."""
        return self._reset(seed)

    def reset_at(self, seed: int, start: Array) -> Observation:
        """Begin where `start` says: each number is a place between the ends of what the task draws from.

        A task that does not like a draw, such as a goal too near to the thing, draws again; what it draws then is a
        function of `start` as well.
        """
        env, space = self._env, self._env._random_reset_space
        draws = 0

        def draw() -> Array:
            nonlocal draws
            if env._freeze_rand_vec:
                frozen: Array = env._last_rand_vec
                return frozen
            vector: Array = space.low.astype(np.float64)
            moved = (start + draws * _SHIFT * np.arange(1, self.start_size + 1)) % 1.0
            shares = moved if draws else np.clip(start, 0.0, 1.0)
            vector[self._free] += shares * (space.high - space.low)[self._free]
            draws += 1
            env._last_rand_vec = vector
            return vector

        env._get_state_rand_vec = draw
        try:
            return self._reset(seed)
        finally:
            del env._get_state_rand_vec

    def _reset(self, seed: int) -> Observation:
        env = self._env
        for name, values in self._model_at_start.items():
            getattr(env.model, name)[:] = values
        env.seed(seed)
        # Tasks draw until the draw pleases them. Some then read where things are before MuJoCo has moved them there,
        # so the scene is set twice with one draw, as Meta-World's own benchmarks do.
        env.seeded_rand_vec, env._freeze_rand_vec, env.draws_only = True, False, True
        self._set_scene()
        env._freeze_rand_vec, env.draws_only = True, False
        raw = self._set_scene()
        env.curr_path_length = 0
        env._prev_obs = raw[:18].copy()
        raw[18:36] = raw[:18]
        self._raw = raw
        return self._observe()

    def _set_scene(self) -> Array:
        import_extra("mujoco", "sim").mj_resetData(self._env.model, self._env.data)
        raw: Array = self._env.reset_model()
        return raw

    def step(self, action: Array) -> StepOutcome:
        """Move the hand by an action within -1..1, which is where it is clipped to."""
        self._raw, reward, _, truncated, info = self._env.step(np.clip(np.asarray(action, np.float32), -1.0, 1.0))
        success = bool(info["success"])
        return StepOutcome(self._observe(), float(reward), success, truncated and not success, success, info)

    def expert_action(self) -> Array:
        """Return what Meta-World's scripted expert does now, clipped to -1..1."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the experts ask for more than the bounds, by design
            action = self._expert.get_action(self._raw)
        bounded: Array = np.clip(action, -1.0, 1.0).astype(np.float32)
        return bounded

    def scene(self) -> dict[str, float]:
        """Return where hand, things and goal are, whatever of it is observed."""
        named = zip(STATE_NAMES, self._raw.tolist(), strict=True)
        return {name: value for name, value in named if not name.startswith("previous_")}

    def _observe(self) -> Observation:
        raw = self._raw
        if self._state == "hand":
            raw = raw[_HAND]
        elif self._state == "relative":
            at = {name: raw[first : first + 3] for name, first in _POINTS.items()}
            raw = np.concatenate([raw, *(at[one] - at[other] for one, other in _BETWEEN)])
        seen: Observation = {STATE: raw.astype(np.float32)}
        for camera in self.cameras if self.looks else ():
            seen[image_name(camera)] = self._eye.render(self._env.data, camera)
        return seen

    def render(self) -> Array:
        """Return a picture of the scene for people."""
        return self._screen.render(self._env.data, self._render_camera)

    def close(self) -> None:
        """Release the OpenGL contexts."""
        self._eye.close()
        self._screen.close()


_SHIFT = 0.6180339887498949
"""How far a start moves on where a task does not take it: by the golden ratio, which never comes back."""
_MOVED = ("body_pos", "body_quat", "site_pos", "site_quat", "geom_pos", "geom_quat")
"""What tasks change in their model when an episode begins."""


def require_task(task: str) -> str:
    """Return the short name of a task; raise, with the nearest one, if there is none."""
    name = task.removesuffix("-v3")
    if name not in TASKS:
        near = did_you_mean(name, TASKS)
        raise ConfigError(f"Meta-World has no task {task!r}{near + ' It' if near else '; it'} has: {', '.join(TASKS)}")
    return name


def _make(name: str) -> tuple[Any, Any]:
    classes = import_extra("metaworld.env_dict", "sim").ALL_V3_ENVIRONMENTS
    experts = import_extra("metaworld.policies", "sim").ENV_POLICY_MAP
    env = quick_class(classes[f"{name}-v3"])()
    env._partially_observable = False
    del env.sawyer_observation_space  # cached with the goal hidden
    env._set_task_called = True
    return env, experts[f"{name}-v3"]()
