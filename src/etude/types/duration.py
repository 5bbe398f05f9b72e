"""How long, in whichever unit a run is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Unit = Literal["steps", "epochs", "tokens", "env_steps", "seconds"]

_SUFFIXES: dict[str, tuple[Unit, float]] = {
    "step": ("steps", 1), "epoch": ("epochs", 1), "ep": ("epochs", 1), "token": ("tokens", 1),
    "env_step": ("env_steps", 1), "env step": ("env_steps", 1),
    "second": ("seconds", 1), "sec": ("seconds", 1), "s": ("seconds", 1),
    "minute": ("seconds", 60), "min": ("seconds", 60), "m": ("seconds", 60),
    "hour": ("seconds", 3600), "h": ("seconds", 3600),
}  # fmt: skip
_PATTERN = re.compile(r"^\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z_ ]*?)\s*$")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come, in every unit at once. Never reset, never per epoch."""

    step: int = 0
    """Optimizer steps taken."""
    epochs: float = 0.0
    """Passes over the training data."""
    tokens: float = 0.0
    """What the loss counts (its weight): tokens for language, frames for robots, summed over ranks."""
    env_steps: int = 0
    """Environment steps that rollouts took."""
    seconds: float = 0.0
    """Wall-clock time spent training, over all sessions of the run."""

    def to_dict(self) -> dict[str, float]:
        """Return the counters as plain numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training: `Duration(100)`, `Duration.parse("3 epochs")`, `Duration.parse("10 min")`."""

    value: float
    unit: Unit = "steps"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(f"unknown unit {self.unit!r}; one of {', '.join(get_args(Unit))}")
        if not 0 < self.value < float("inf"):
            raise ValueError(f"a duration must be positive and finite, got {self.value!r}")
        if self.unit in ("steps", "env_steps") and self.value != int(self.value):
            raise ValueError(f"a duration in {self.unit} must be a whole number, got {self.value!r}")

    @classmethod
    def parse(cls, value: Any) -> Duration:
        """Read an int (steps), a `Duration`, or text such as `500`, `2 epochs`, `1e6 tokens`, `30 min`."""
        if isinstance(value, Duration):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"cannot read {value!r} as a duration; try 500, '2 epochs', '1e6 tokens' or '30 min'")
        if not isinstance(value, str):
            return cls(value)
        match = _PATTERN.match(value)
        suffix = match.group(2).lower() if match else ""
        known = _SUFFIXES.get(suffix or "step") or _SUFFIXES.get(suffix.removesuffix("s"))
        if not match or not known:
            raise ValueError(f"cannot read {value!r} as a duration; try 500, '2 epochs', '1e6 tokens' or '30 min'")
        unit, factor = known
        return cls(float(match.group(1).replace("_", "")) * factor, unit)

    def measure(self, progress: Progress) -> float:
        """Return the counter of `progress` that this duration is measured in."""
        return float(progress.step if self.unit == "steps" else getattr(progress, self.unit))

    def reached(self, progress: Progress) -> bool:
        """Tell whether `progress` has come this far."""
        return self.measure(progress) >= self.value

    def due(self, before: Progress, after: Progress) -> bool:
        """Tell whether a multiple of this duration lies in (before, after]: for 'every ...' cadences."""
        return self.measure(after) // self.value > self.measure(before) // self.value

    def __str__(self) -> str:
        value = int(self.value) if self.value == int(self.value) else self.value
        return f"{value} {self.unit.replace('_', ' ')}"
