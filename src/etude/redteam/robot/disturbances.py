"""What may happen to a robot, as a vector of numbers that has a likelihood.

Each kind of disturbance takes some numbers of the vector: uniform ones from 0 to 1, all of which are as likely, and
standard normal ones, which are the less likely the larger they are. Shape letters: N vectors, D numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean
from etude.simulation.environments.base import Array, CanChooseStart, Environment
from etude.types.names import ACTION

KINDS = {"start": 1.0, "push": 1.0, "noise": 0.1, "latency": 1.0, "camera": 0.03}
"""How strong each kind is unless told: one deviation of a push in deviations of the action, of sensor noise in
deviations of each number, of latency in steps, of a camera in widths of its picture. A start has no strength."""
MOST_STRENGTH = 10_000
"""Beyond any meaning; numbers that overflow come later."""
PLAUSIBLE = 0.01
"""Vectors that are less likely than all but this share of what chance draws are not looked at."""
DISTINCT = 0.5
"""Failures are distinct if their vectors differ by more than this, as a root mean square in deviations; two that are
drawn by chance differ by 1.4."""
_WIDTH = math.sqrt(12.0)
"""How many deviations a uniform number ranges over."""


@dataclass(frozen=True)
class EpisodeDisturbance:
    """What happens in one episode."""

    start: Array | None = None
    """Where it begins, by numbers from 0 to 1."""
    pushes: tuple[tuple[int, Array], ...] = ()
    """The first step of each push, and what it adds to the action, in deviations of it."""
    noise: float = 0.0
    """Deviation of the noise on what is seen, in deviations of each number."""
    latency: int = 0
    """Steps that observations are late."""
    camera: tuple[float, float] = (0.0, 0.0)
    """How far pictures are shifted to the right and down, in widths."""


@dataclass(frozen=True)
class DisturbanceSpace:
    """All that may disturb an episode of an environment.

    Args:
        strengths: Kinds of disturbance, with the strength of each.
        start_size: Numbers that say how an episode begins.
        action_names: Names of the numbers of an action.
        pushes: Pushes in an episode, each in a part of the window of its own.
        push_steps: Steps for which a push lasts.
        window: Steps in which pushes begin.
    """

    strengths: Mapping[str, float]
    start_size: int = 0
    action_names: tuple[str, ...] = ()
    pushes: int = 2
    push_steps: int = 10
    window: int = 100

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the numbers of a vector are."""
        return tuple(name for kind in self.strengths for name in self._names_of(kind))

    def _names_of(self, kind: str) -> list[str]:
        if kind == "start":
            return [f"start {place + 1}" for place in range(self.start_size)]
        if kind == "push":
            parts = ("when", *self.action_names)
            return [f"push {place + 1} {part}" for place in range(self.pushes) for part in parts]
        return ["camera x", "camera y"] if kind == "camera" else [kind]

    @cached_property
    def is_uniform(self) -> Array:
        """Which numbers are uniform, (D,)."""
        return np.array([name.startswith("start ") or name.endswith(" when") for name in self.names], bool)

    def slice_of(self, kind: str) -> slice:
        """Return where the numbers of a kind are."""
        kinds = list(self.strengths)
        first = sum(len(self._names_of(one)) for one in kinds[: kinds.index(kind)])
        return slice(first, first + len(self._names_of(kind)))

    # ---- likelihood --------------------------------------------------------------------------------------------------

    def log_likelihood(self, vectors_ND: Array) -> Array:
        """Return how likely vectors are beside the likeliest one, as a logarithm: at most 0, (N,)."""
        found: Array = -0.5 * np.square(vectors_ND[..., ~self.is_uniform]).sum(-1)
        return found

    def plausibility(self, vectors_ND: Array) -> Array:
        """Return the share of what chance draws that is less likely, from 1 (nothing is likelier) to 0, (N,)."""
        half = torch.as_tensor(-self.log_likelihood(vectors_ND), dtype=torch.float64)
        normals = int((~self.is_uniform).sum())
        if not normals:
            return np.ones(half.shape)
        found: Array = torch.special.gammaincc(torch.tensor(normals / 2, dtype=torch.float64), half).numpy()
        return found

    @cached_property
    def most_unlikely(self) -> float:
        """What the squares of all normal numbers of a plausible vector sum up to at most."""
        normals = int((~self.is_uniform).sum())
        low, high = 0.0, 20.0 + 10.0 * normals
        for _ in range(60):  # to the last digit
            middle = (low + high) / 2
            at = torch.special.gammaincc(
                torch.tensor(max(1, normals) / 2.0).double(), torch.tensor(middle / 2).double()
            )
            low, high = (middle, high) if at > PLAUSIBLE else (low, middle)
        return low

    def unlikelihood(self, vectors_ND: Array) -> Array:
        """Return how unlikely vectors are: 0 for the likeliest, 1 on the average of what chance draws, (N,)."""
        return -2.0 * self.log_likelihood(vectors_ND) / max(1, int((~self.is_uniform).sum()))

    def draw(self, generator: np.random.Generator) -> Array:
        """Draw a vector by its likelihood, again where it is implausible."""
        while True:
            uniform, normal = generator.random(len(self.names)), generator.standard_normal(len(self.names))
            vector: Array = np.where(self.is_uniform, uniform, normal)
            if self.plausibility(vector) >= PLAUSIBLE:
                return vector

    def whiten(self, vectors_ND: Array) -> Array:
        """Return vectors in deviations from the mean of each number."""
        found: Array = np.where(self.is_uniform, (vectors_ND - 0.5) * _WIDTH, vectors_ND)
        return found

    def unwhiten(self, white_ND: Array) -> Array:
        """Return the vectors that `whiten` was given; uniform numbers beyond 0 and 1 are reflected."""
        folded = np.abs(np.mod(white_ND / _WIDTH + 0.5 + 1.0, 2.0) - 1.0)
        found: Array = np.where(self.is_uniform, folded, white_ND)
        return found

    def distance(self, one_D: Array, others_ND: Array) -> Array:
        """Return how far a vector is from others: the root mean square over its numbers, in deviations, (N,)."""
        return white_distance(self.whiten(one_D), self.whiten(others_ND))

    def distinct(self, vectors_ND: Array, distance: float = DISTINCT) -> list[int]:
        """Return the vectors that are distinct, by number: each differs from all that were taken before it."""
        taken: list[int] = []
        for number, vector in enumerate(vectors_ND):
            if not taken or (self.distance(vector, vectors_ND[taken]) > distance).all():
                taken.append(number)
        return taken

    # ---- meaning -----------------------------------------------------------------------------------------------------

    def read(self, vector: Array) -> EpisodeDisturbance:
        """Return what a vector means."""
        values: dict[str, Any] = {}
        for kind, strength in self.strengths.items():
            numbers = vector[self.slice_of(kind)]
            if kind == "start":
                values["start"] = numbers.copy()
            elif kind == "push":
                values["pushes"] = tuple(self._pushes(numbers.reshape(self.pushes, -1), strength))
            elif kind == "camera":
                values["camera"] = (strength * float(numbers[0]), strength * float(numbers[1]))
            elif kind == "latency":
                values["latency"] = int(abs(float(numbers[0])) * strength)
            else:
                values["noise"] = abs(float(numbers[0])) * strength
        return EpisodeDisturbance(**values)

    def _pushes(self, rows: Array, strength: float) -> list[tuple[int, Array]]:
        part = self.window / self.pushes
        return [
            (int(part * (place + min(float(row[0]), 1 - 1e-9))), strength * row[1:]) for place, row in enumerate(rows)
        ]

    def tell(self, vector: Array) -> list[str]:
        """Return what a vector means in words."""
        found, told = self.read(vector), []
        for first, force in found.pushes:
            parts = zip(self.action_names, force, strict=True)
            shown = ", ".join(f"{name} {value:+.2f}" for name, value in parts if abs(value) >= 0.005)
            told.append(f"pushed at step {first} for {self.push_steps} steps: {shown or 'hardly'}")
        if "noise" in self.strengths:
            told.append(f"sensor noise of {found.noise:.3f} deviations")
        if "latency" in self.strengths:
            told.append(f"observations {found.latency} step{'' if found.latency == 1 else 's'} late")
        if "camera" in self.strengths:
            told.append(f"cameras shifted by {found.camera[0]:+.1%} and {found.camera[1]:+.1%} of a width")
        return told

    def describe(self) -> dict[str, Any]:
        """Return plain values that another space is told from this one by."""
        return {
            "strengths": dict(self.strengths), "start_size": self.start_size, "action_names": list(self.action_names),
            "pushes": self.pushes, "push_steps": self.push_steps, "window": self.window,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> DisturbanceSpace:
        """Return the space that `describe` described."""
        return cls(**{**value, "action_names": tuple(value["action_names"])})


def make_space(env: Environment, asked: Sequence[str] = (), strength: float = 1.0) -> DisturbanceSpace:
    """Return what may disturb an environment.

    Args:
        env: The environment.
        asked: Kinds of disturbance, each perhaps with a strength, as in push=0.5; none takes all that the environment
            allows.
        strength: What all strengths are multiplied by.
    """
    if not (math.isfinite(strength) and strength > 0):
        raise ConfigError(f"the strength of disturbances is a number above 0, got {strength:g}")
    why_not = _why_not(env)
    given = dict(_read_kind(text) for text in asked) or {kind: KINDS[kind] for kind in KINDS if kind not in why_not}
    for kind in given:
        if kind in why_not:
            raise ConfigError(f"the disturbance {kind} is not possible here: {why_not[kind]}")
    if not given:
        raise ConfigError(f"nothing can disturb {env.task!r}: {'; '.join(why_not.values())}")
    strengths = {kind: given[kind] * strength for kind in KINDS if kind in given}
    for kind, value in strengths.items():
        if value > MOST_STRENGTH:
            raise ConfigError(f"the strength of {kind} is at most {MOST_STRENGTH:,}, got {value:g}")
    action = env.spec[ACTION]
    size = math.prod(action.shape)
    names = action.names if action.names and len(action.names) == size else [f"action {one}" for one in range(size)]
    return DisturbanceSpace(
        strengths,
        env.start_size if isinstance(env, CanChooseStart) else 0,
        tuple(names),
        window=min(100, env.max_steps),
    )


def _why_not(env: Environment) -> dict[str, str]:
    """Return the kinds that an environment does not allow, each with the reason."""
    found = {}
    if not isinstance(env, CanChooseStart) or not env.start_size:
        found["start"] = "where its episodes begin follows from their seeds alone"
    if env.spec[ACTION].classes is not None:
        found["push"] = "its action is one of several, to which nothing can be added"
    if not any(feature.role in ("state", "environment") for feature in env.spec.features.values()):
        found["noise"] = "it shows pictures only"
    if not env.spec.with_role("image"):
        found["camera"] = "it has no cameras"
    return found


def _read_kind(text: str) -> tuple[str, float]:
    kind, mark, value = text.partition("=")
    if kind not in KINDS:
        near = did_you_mean(kind, KINDS)
        raise ConfigError(f"there is no disturbance {kind!r}{near or ';'} There are {', '.join(KINDS)}")
    try:
        strength = float(value) if mark else KINDS[kind]
    except ValueError:
        strength = math.nan
    if not (math.isfinite(strength) and strength > 0):
        raise ConfigError(f"the strength of a disturbance is a number above 0, as in push=0.5; got {text!r}")
    return kind, strength


def white_distance(one_D: Array, others_ND: Array) -> Array:
    """Return how far a vector is from others that are in deviations already, (N,)."""
    apart: Array = np.sqrt(np.square(others_ND - one_D).mean(-1))
    return apart
