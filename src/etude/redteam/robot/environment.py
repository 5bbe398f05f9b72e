"""An environment in which what a vector says happens: the same vector and seed make the same episode, bit for bit."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping

import numpy as np

from etude.redteam.robot.disturbances import DisturbanceSpace, EpisodeDisturbance
from etude.rng import fold
from etude.simulation.environments.base import (
    Array,
    CanChooseStart,
    Environment,
    HasExpert,
    HasScene,
    Observation,
    StepOutcome,
)
from etude.types import DataSpec
from etude.types.names import ACTION

_NOISE_STREAM = 0x57E55
Units = Mapping[str, Array]
"""Deviation of each number, by feature."""


class DisturbedEnvironment:
    """An environment that is pushed, seen dimly, late and askew, as the vector of each episode says.

    Pushes are added to what is executed, never to what is recorded; noise, latency and shifts change what is seen and
    not what is so. An expert that the environment comes with sees things as they are.

    Args:
        env: The environment.
        space: What the vectors mean.
        plan: The vector of each episode, by the seed that it is reset with; seeds that it lacks are not disturbed.
        units: One deviation of observations and of the action, by feature; 1 where there is none.
    """

    def __init__(self, env: Environment, space: DisturbanceSpace, plan: Mapping[int, Array], units: Units) -> None:
        self._env, self._space, self.plan = env, space, plan
        self._units = {name: np.asarray(unit, np.float32) for name, unit in units.items()}
        self._feature = env.spec[ACTION]
        self._now = EpisodeDisturbance()
        self._seed = self._step = 0
        self._late: deque[Observation] = deque(maxlen=1)
        # Whether an environment has these is asked of protocols, which look for attributes that are there and from
        # Python 3.12 on ask no __getattr__. `looks` is not passed on: pictures that come late must have been taken.
        if isinstance(env, HasExpert):
            self.expert_action = env.expert_action
        if isinstance(env, HasScene):
            self.scene = env.scene

    @property
    def spec(self) -> DataSpec:
        """The features of observations and actions."""
        return self._env.spec

    @property
    def fps(self) -> float:
        """Steps in one second of simulated time."""
        return self._env.fps

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""
        return self._env.max_steps

    @property
    def task(self) -> str:
        """What is to be done, in words."""
        return self._env.task

    def render(self) -> Array:
        """Return a picture of the scene for people."""
        return self._env.render()

    def close(self) -> None:
        """Release what the simulator holds."""
        self._env.close()

    @property
    def undisturbed(self) -> Environment:
        """The environment as it is."""
        return self._env

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed, with what its vector says."""
        vector = self.plan.get(seed)
        self._begin(seed, EpisodeDisturbance() if vector is None else self._space.read(vector))
        start = self._now.start
        if start is not None and isinstance(self._env, CanChooseStart):
            return self._show(self._env.reset_at(seed, start))
        return self._show(self._env.reset(seed))

    def disturb(self, vector: Array) -> None:
        """Let another vector hold for the rest of the episode, as one does who decides as it goes on."""
        self._now = self._space.read(vector)

    def _begin(self, seed: int, disturbance: EpisodeDisturbance) -> None:
        self._seed, self._step, self._now = seed, 0, disturbance
        self._late = deque(maxlen=disturbance.latency + 1)

    def step(self, action: Array) -> StepOutcome:
        """Act, pushed aside where a push lasts, and return what is seen of it."""
        for first, force in self._now.pushes:
            if first <= self._step < first + self._space.push_steps and self._feature.classes is None:
                unit = self._units.get(ACTION, np.ones((), np.float32))
                pushed = np.asarray(action) + unit * force.reshape(self._feature.shape)
                action = pushed.astype(self._feature.dtype)
        self._step += 1
        outcome = self._env.step(action)
        return StepOutcome(
            self._show(outcome.observation), outcome.reward, outcome.terminated, outcome.truncated, outcome.success,
            outcome.info,
        )  # fmt: skip

    def _show(self, observation: Observation) -> Observation:
        self._late.append(observation)
        seen = dict(self._late[0])
        for name, value in seen.items():
            if value.dtype == np.uint8 and value.ndim == 3:
                seen[name] = shift_picture(value, *self._now.camera)
            elif self._now.noise and value.dtype.kind == "f":
                generator = np.random.default_rng(
                    fold(_NOISE_STREAM, self._seed, self._step, zlib.crc32(name.encode()))
                )
                unit = self._units.get(name, np.ones((), np.float32))
                noise = self._now.noise * unit * generator.standard_normal(value.shape)
                seen[name] = (value + noise).astype(value.dtype)
        return seen


def shift_picture(picture: Array, right: float, down: float) -> Array:
    """Return a picture shifted by shares of its width; what comes into sight repeats the edge."""
    height, width = picture.shape[:2]
    across, along = round(right * width), round(down * width)
    if not (across or along):
        return picture
    rows = np.clip(np.arange(height) - along, 0, height - 1)
    columns = np.clip(np.arange(width) - across, 0, width - 1)
    return np.ascontiguousarray(picture[rows][:, columns])


def units_of(spec: DataSpec | None) -> dict[str, Array]:
    """Return one deviation of each number that a policy was trained on, where its data says."""
    found = {}
    for name, feature in ({} if spec is None else spec.features).items():
        stats = feature.stats or {}
        if "std" in stats and feature.role in ("state", "environment", "action"):
            found[name] = np.asarray(stats["std"], np.float32).reshape(feature.shape)
    return found
