"""Any Gymnasium environment by its id, with Box or Dict-of-Box observations and Box or Discrete actions."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.errors import ConfigError, MissingExtraError
from etude.extras import import_extra
from etude.simulation.environments.base import Array, Observation, StepOutcome, as_image
from etude.simulation.environments.rendering import prepare_mujoco
from etude.types import DataSpec, Feature
from etude.types.names import ACTION, ENVIRONMENT_STATE, STATE, image_name

_STATE_KEYS = ("agent_pos", "observation", "proprioception", "state")
_DEFAULT_FPS = 30.0
_DEFAULT_MAX_STEPS = 1000


class GymEnvironment:
    """A Gymnasium environment by its id, as in gym:Pendulum-v1.

    A flat observation is `observation.state`, a picture `observation.images.pixels`. Of a dictionary of observations,
    `agent_pos`, `state`, `proprioception` and `observation` are the state, pictures keep their names, and everything
    else is the environment state.

    Args:
        id: Gymnasium's id; module:Id-v0 imports a module first.
        task: What is to be done, in words; the id unless given.
        max_steps: Steps before an episode is truncated; None takes the environment's own limit.
        success_return: An episode succeeds once its rewards sum to this; None takes `is_success` or `success` of the
            environment's info; where there is neither, episodes have a reward and no success.
        render: Whether `render` will be asked for pictures, which the environment must be told when it is made.
        options: Arguments of the environment itself.
    """

    _start: dict[str, Any] | None = None
    """What the environment is told about how the next episode begins."""

    def __init__(
        self,
        id: str,
        task: str | None = None,
        max_steps: int | None = None,
        success_return: float | None = None,
        render: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"gym: max_steps must be at least 1, got {max_steps}")
        self.name = id
        self._env = _make(id, max_steps, {**({"render_mode": "rgb_array"} if render else {}), **(options or {})})
        self.task = task or id
        self.fps = float(self._env.metadata.get("render_fps") or _DEFAULT_FPS)
        self.max_steps = max_steps or getattr(self._env.spec, "max_episode_steps", None) or _DEFAULT_MAX_STEPS
        self._success_return = success_return
        self._steps, self._return = 0, 0.0
        self._names = _name_observations(self._env.observation_space, id)
        features = {name: _describe(parts) for name, parts in self._names.items()}
        features[ACTION], self._low, self._high = _describe_action(self._env.action_space, id)
        self.spec = DataSpec(features, self.fps)

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed."""
        self._steps, self._return = 0, 0.0
        observation, _ = self._env.reset(seed=seed, options=self._start)
        return self._convert(observation)

    def step(self, action: Array) -> StepOutcome:
        """Act; a continuous action is clipped to its bounds."""
        given: Any = np.asarray(action)
        if self._low is None:
            given = int(given.reshape(()))
        else:
            given = np.clip(given.reshape(self._low.shape), self._low, self._high).astype(self._low.dtype)
        observation, reward, terminated, truncated, info = self._env.step(given)
        self._steps += 1
        self._return += float(reward)
        success = self._is_success(info)
        ended = bool(terminated) or (success is True and self._success_return is not None)
        late = not ended and (bool(truncated) or self._steps >= self.max_steps)
        return StepOutcome(self._convert(observation), float(reward), ended, late, success, info)

    def _is_success(self, info: Mapping[str, Any]) -> bool | None:
        if self._success_return is not None:
            return self._return >= self._success_return
        told = info.get("is_success", info.get("success"))
        return None if told is None else bool(told)

    def _convert(self, observation: Any) -> Observation:
        converted: Observation = {}
        for name, parts in self._names.items():
            values = [np.asarray(observation if key is None else observation[key]) for key, _ in parts]
            if name.startswith("observation.images."):
                converted[name] = as_image(values[0], name)
            else:
                converted[name] = np.concatenate([value.reshape(-1) for value in values]).astype(np.float32)
        return converted

    def render(self) -> Array:
        """Return a picture of the scene for people."""
        return as_image(self._env.render(), f"the environment {self.name}")

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


_Names = dict[str, list[tuple[str | None, Any]]]
"""Feature name -> the keys of the observation it is made of (None: the whole of it), with their spaces."""


def _make(id: str, max_steps: int | None, options: Mapping[str, Any]) -> Any:
    prepare_mujoco()
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # or SDL looks for a screen, and says that there is none
    gymnasium = import_extra("gymnasium", "sim")
    limit = {} if max_steps is None else {"max_episode_steps": max_steps}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about newer versions of an id, and about spaces of other people's making
            return gymnasium.make(id, disable_env_checker=True, **limit, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"the environment {id} needs more packages: {error}") from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"Gymnasium cannot make the environment {id!r}: {error}") from error


def _name_observations(space: Any, id: str) -> _Names:
    spaces = import_extra("gymnasium.spaces", "sim")
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}
    names: _Names = {}
    for key, part in parts.items():
        if not isinstance(part, spaces.Box):
            where = f" at {key!r}" if key else ""
            raise ConfigError(f"{id} observes {type(part).__name__}{where}; only Box observations can be learned from")
        if len(part.shape) == 3 and part.dtype == np.uint8:
            names[image_name(key or "pixels")] = [(key, part)]
        else:
            name = STATE if key is None or key in _STATE_KEYS else ENVIRONMENT_STATE
            names.setdefault(name, []).append((key, part))
    return names


def _describe(parts: list[tuple[str | None, Any]]) -> Feature:
    if len(parts) == 1 and len(parts[0][1].shape) == 3:
        return Feature(tuple(parts[0][1].shape), "uint8", "image")
    size = sum(math.prod(space.shape) for _, space in parts)
    is_state = any(key is None or key in _STATE_KEYS for key, _ in parts)
    return Feature((size,), "float32", "state" if is_state else "environment")


def _describe_action(space: Any, id: str) -> tuple[Feature, Array | None, Array | None]:
    spaces = import_extra("gymnasium.spaces", "sim")
    if isinstance(space, spaces.Discrete):
        if space.start:
            raise ConfigError(f"{id} counts its actions from {space.start}; only actions from 0 can be learned")
        return Feature((), "int64", "action", classes=int(space.n)), None, None
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"{id} acts in {type(space).__name__}; only Box and Discrete actions can be learned")
    # Bounds are the statistics of an action that nobody has recorded yet.
    is_bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
    bounds = {"min": space.low.tolist(), "max": space.high.tolist()} if is_bounded else None
    return Feature(tuple(space.shape), "float32", "action", stats=bounds), space.low, space.high
