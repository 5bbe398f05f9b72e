"""Windows that a dataset factory is told: actions ahead, and histories of numbers and of pictures behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from etude.data.windows import role_of
from etude.errors import DataError


@dataclass(frozen=True)
class Histories:
    """How many frames of each kind belong to a sample, `stride` frames apart, the oldest first and the newest last.

    Actions always have a time of their own, (B, T, ...); a history of 1 is a single frame, (B, ...).
    """

    actions: int
    numbers: int
    pictures: int
    stride: int = 1

    def __post_init__(self) -> None:
        if min(self.actions, self.numbers, self.pictures) < 1:
            raise DataError(
                f"{self.actions} actions, {self.numbers} frames of numbers and {self.pictures} of pictures: each must "
                "be at least 1"
            )

    def deltas(self, names: Iterable[str], cameras: Iterable[str]) -> dict[str, list[int]]:
        """Return distances in frames by feature name; features without any come as single frames."""
        seen, found = set(cameras), {}
        for name in names:
            if role_of(name) == "action":
                found[name] = [step * self.stride for step in range(self.actions)]
            elif name in seen or name.startswith("observation"):
                length = self.pictures if name in seen else self.numbers
                found[name] = [step * self.stride for step in range(1 - length, 1)]
        return {name: steps for name, steps in found.items() if len(steps) > 1 or role_of(name) == "action"}

    def agreed(self, observation: Sequence[int] | None, action: Sequence[int] | None) -> Histories:
        """Return the windows that fit what a policy asks for too; refuse a policy that asks for others."""
        numbers, pictures = self.numbers, self.pictures
        if action is not None and len(action) != self.actions:
            raise DataError(f"the policy plans {len(action)} actions, and the data is told to hold {self.actions}")
        if observation is not None:
            if (numbers, pictures) == (1, 1):  # nothing was said
                numbers = pictures = len(observation)
            for what, length in (("numbers", numbers), ("pictures", pictures)):
                if length != len(observation):
                    raise DataError(
                        f"the policy sees {len(observation)} frames, and the data is told to hold {length} of {what}"
                    )
        return Histories(self.actions, numbers, pictures, self.stride)


def named_statistics(stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what of a dataset's statistics normalises batches: that of observations and actions."""
    return {
        name: {kind: found[kind] for kind in ("mean", "std", "min", "max") if kind in found}
        for name, found in stats.items()
        if name.startswith("observation") or role_of(name) == "action"
    }
