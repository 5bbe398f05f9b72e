"""What is kept of an episode: what the policy saw, planned and did, at some of its steps. Imports no torch.

Shape letters: P kept steps, S state, A action.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TRACED = ("steps", "state", "action", "planned", "age", "disagreement", "uncertainty", "distance")
"""The arrays of a trace."""


@dataclass
class EpisodeTrace:
    """One episode as the policy met it, at some of its steps; NaN where there is nothing to say."""

    env: str
    episode: int
    features: tuple[str, ...]
    """The features that the state is made of."""
    names: tuple[str, ...]
    """What the numbers of the state are."""
    scene: dict[str, float]
    """Where things were at the beginning."""
    ended: bool
    """Whether the episode ended by its own rules rather than because its time was up."""
    steps: Array
    """Which steps are kept, (P,)."""
    state: Array
    """What was seen, pictures left out, (P, S)."""
    action: Array
    """What was done, (P, A)."""
    planned: Array
    """What the newest plan had for this step, (P, A)."""
    age: Array
    """Steps since that plan was made, (P,)."""
    disagreement: Array
    """How far the two newest plans are apart about this step, in deviations of the demonstrated actions, (P,)."""
    uncertainty: Array
    """How far samples of the newest plan are apart, in the same unit, (P,)."""
    distance: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    """How far the state is from the nearest demonstration, in deviations of each number, (P,); empty if unknown."""

    def to_message(self) -> dict[str, Any]:
        """Return plain values, small enough for a pipe."""
        arrays = {name: _packed(getattr(self, name)) for name in TRACED}
        return {**{name: value for name, value in vars(self).items() if name not in TRACED}, **arrays}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> EpisodeTrace:
        """Return the trace that `to_message` described."""
        arrays = {name: _unpacked(message[name]) for name in TRACED}
        return cls(**{**message, **arrays, "features": tuple(message["features"]), "names": tuple(message["names"])})


def _packed(values: Array) -> list[Any]:
    return [list(values.shape), base64.b64encode(values.astype(np.float32).tobytes()).decode()]


def _unpacked(packed: Sequence[Any]) -> Array:
    shape, text = packed
    return np.frombuffer(base64.b64decode(text), np.float32).reshape(shape)
