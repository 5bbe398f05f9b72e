"""`Windows`: episodes in memory or in memory-mapped files, with a window in time around each frame.

Shape letters: B batch, T time within a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from etude.data.columns import Column, Columns, pick_rows
from etude.data.order import Indices, Keys
from etude.errors import DataError
from etude.types import DataSpec, Feature

_CHUNK_BYTES = 1 << 25
Role = Literal["state", "image", "environment", "action", "task", "text", "other"]


class Windows(Columns):
    """A dataset of frames, each with its neighbours in time, gathered for a whole batch at once.

    A feature with deltas `[d1, d2, ...]` comes as (B, T, ...), the frames at those distances, clamped to the episode;
    `<name>_is_pad` (B, T) is true where a frame lies outside of it. A feature without deltas comes as (B, ...).

    Args:
        columns: All frames of all episodes, by feature name, each (frames, ...).
        episode_ends: The frame after the last one of each episode, rising; the last equals the number of frames.
        deltas: Distances in frames, by feature name.
        fps: Frames per second, for the spec.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        episode_ends: Sequence[int] | np.ndarray[Any, Any],
        deltas: Mapping[str, Sequence[int]] | None = None,
        *,
        fps: float | None = None,
    ) -> None:
        super().__init__(columns)
        ends = np.asarray(episode_ends, dtype=np.int64)
        lengths = np.diff(ends, prepend=0)
        if not len(ends) or ends[-1] != len(self) or (lengths <= 0).any():
            raise DataError(f"episode_ends must rise to the number of frames ({len(self)}), got {ends.tolist()[-5:]}")
        deltas = deltas or {}
        unknown = sorted(set(deltas) - set(self.columns))
        if unknown:
            raise DataError(f"deltas name {unknown}, which are no columns; there are {sorted(self.columns)}")
        if empty := sorted(name for name, steps in deltas.items() if not len(steps)):
            raise DataError(f"the deltas of {empty} are empty; leave the feature out to get single frames")
        # First and last frame of the episode of each frame, so that clamping is one vectorised step.
        self._first = torch.from_numpy(np.repeat(ends - lengths, lengths))
        self._last = torch.from_numpy(np.repeat(ends - 1, lengths))
        # Features that share their deltas share the arithmetic.
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, steps in deltas.items():
            groups.setdefault(tuple(map(int, steps)), []).append(name)
        self._groups = [(torch.tensor(steps), names) for steps, names in groups.items()]
        self._single = [name for name in self.columns if name not in deltas]
        self._fps = fps

    def gather(self, indices: Indices, keys: Keys) -> dict[str, Tensor]:
        """Return the windows at `indices` as one batch."""
        frames_B = torch.from_numpy(indices)
        batch = {name: pick_rows(self.columns[name], frames_B) for name in self._single}
        if self._groups:
            bounds_B1 = (self._first[frames_B].unsqueeze(1), self._last[frames_B].unsqueeze(1))
            self._add_windows(batch, frames_B.unsqueeze(1), *bounds_B1)
        return batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = {name: torch.as_tensor(self.columns[name][index]) for name in self._single}
        self._add_windows(sample, index, int(self._first[index]), int(self._last[index]))
        return sample

    def _add_windows(self, batch: dict[str, Tensor], frames: Any, first: Any, last: Any) -> None:
        """Add the windows around one frame, or around one in each row, within the bounds of its episode."""
        for steps_T, names in self._groups:
            wanted = frames + steps_T
            rows = wanted.clamp(first, last)
            is_pad = rows != wanted
            for name in names:
                batch[name] = pick_rows(self.columns[name], rows)
                batch[f"{name}_is_pad"] = is_pad

    @cached_property
    def spec(self) -> DataSpec:
        """The features, with mean, std, min and max over all frames."""
        features = {
            name: Feature(tuple(column.shape[1:]), _dtype(column), role_of(name), stats=statistics(column))
            for name, column in self.columns.items()
        }
        return DataSpec(features, self._fps)


def role_of(name: str) -> Role:
    """Guess what a feature is from its name, by LeRobot's convention."""
    prefixes: dict[str, Role] = {
        "action": "action",
        "observation.image": "image",
        "observation.environment": "environment",
        "observation.state": "state",
        "task": "task",
    }
    return next((role for prefix, role in prefixes.items() if name.startswith(prefix)), "other")


def statistics(column: Column) -> dict[str, Tensor]:
    """Return mean, std, min and max over the rows of a column, in float32, and the number of rows."""
    rows = len(column)
    chunk = max(1, _CHUNK_BYTES // (8 * max(1, math.prod(column.shape[1:]))))
    starts = range(0, rows, chunk)
    parts = [(v.sum(0), v.amin(0), v.amax(0)) for v in (_float64(column[at : at + chunk]) for at in starts)]
    sums, lows, highs = (torch.stack(values) for values in zip(*parts, strict=True))
    mean = sums.sum(0) / rows
    # A second pass keeps the variance exact where the mean is large and the spread small.
    squares = sum(
        ((_float64(column[at : at + chunk]) - mean).square_().sum(0) for at in starts), torch.zeros_like(mean)
    )
    named = {"mean": mean, "std": (squares / rows).sqrt(), "min": lows.amin(0), "max": highs.amax(0)}
    return {**{name: value.float() for name, value in named.items()}, "count": torch.tensor([rows])}


def _float64(values: Column) -> Tensor:
    if isinstance(values, Tensor):
        return values.to(torch.float64)
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _dtype(column: Column) -> str:
    return str(column.dtype).removeprefix("torch.")
