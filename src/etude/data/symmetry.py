"""Turn or mirror samples: where a task looks the same from all sides, or in a mirror, one demonstration shows many.

Shape letters: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.data.named_numbers import NamedNumbers
from etude.data.noise import uniforms
from etude.data.order import Keys
from etude.errors import ConfigError, DataError
from etude.rng import fold_array
from etude.types import DataSpec

_STREAM = 1 << 20
"""Apart from the streams of cameras, which are counted from 0."""
_MIRROR_STREAM = _STREAM + 1


class RandomTurn:
    """Turn pairs of numbers (x, y) of a sample by one angle, drawn from the sample's key.

    Args:
        pairs: Two names each: of a position, a velocity or an action along x, and along y.
        spec: The features that hold the numbers.
    """

    def __init__(self, pairs: Sequence[Sequence[str]], spec: DataSpec) -> None:
        known = NamedNumbers(spec, ("state", "environment", "action"))
        places = [known.find("augmentation turn", list(pair)) for pair in pairs]
        for pair, found in zip(pairs, places, strict=True):
            if len(found) != 2 or found[0][0] != found[1][0]:
                raise ConfigError(f"augmentation turn takes pairs of numbers of one feature, got {list(pair)}")
        flat = [place for found in places for place in found]
        if len(set(flat)) < len(flat):
            raise ConfigError("augmentation turn names a number twice, which would be turned twice")
        _refuse_pictures("turn", spec)
        self._places = [(feature, first, second) for (feature, first), (_, second) in places]

    def __call__(self, batch: dict[str, Tensor], keys: Keys) -> None:
        """Turn the numbers of a batch (B, ..., F), all frames of a sample alike."""
        angle_B = torch.from_numpy(uniforms(fold_array(keys, np.array(_STREAM)))) * (2 * np.pi)
        for name in {name for name, _, _ in self._places}:
            batch[name] = batch[name].clone()  # frames may be shared with the dataset
        for name, first, second in self._places:
            values = batch[name]
            shape = (-1, *[1] * (values.dim() - 2))
            cos, sin = (part.to(values.dtype).reshape(shape) for part in (angle_B.cos(), angle_B.sin()))
            x, y = values[..., first].clone(), values[..., second].clone()
            values[..., first], values[..., second] = cos * x - sin * y, sin * x + cos * y


class RandomMirror:
    """Mirror points (x, y) of a sample at a line, or leave the sample as it is, by a coin drawn from the sample's key.

    Args:
        line: Two points of the line, in the data's units.
        points: Two names each for a point along x and along y; four for two points that are each other's image, such as
            the left and the right corner of a thing.
        spec: The features that hold the numbers.
    """

    def __init__(self, line: Sequence[Sequence[float]], points: Sequence[Sequence[str]], spec: DataSpec) -> None:
        known = NamedNumbers(spec, ("state", "environment", "action"))
        self._swaps: list[tuple[str, list[int], list[int]]] = []
        flat = []
        for names in points:
            found = known.find("augmentation mirror", list(names))
            if len(found) != len(names) or len({feature for feature, _ in found}) > 1:
                raise ConfigError(f"augmentation mirror takes points of one feature, got {list(names)}")
            places = [index for _, index in found]
            self._swaps.append((found[0][0], places, places[2:] + places[:2]))
            flat += found
        if len(set(flat)) < len(flat):
            raise ConfigError("augmentation mirror names a number twice, which would be mirrored twice")
        _refuse_pictures("mirror", spec)
        (self._x, self._y), (x, y) = line
        self._dx, self._dy = ((end - start) / math.dist(*line) for start, end in ((self._x, x), (self._y, y)))

    def __call__(self, batch: dict[str, Tensor], keys: Keys) -> None:
        """Mirror about half of the samples of a batch (B, ..., F), all frames of a sample alike."""
        is_mirrored_B = torch.from_numpy(uniforms(fold_array(keys, np.array(_MIRROR_STREAM))) < 0.5)
        changed = {name: batch[name].clone() for name, _, _ in self._swaps}  # frames may be shared with the dataset
        for name, places, images in self._swaps:
            mirrored = self._mirror(batch[name][..., images])
            chosen = is_mirrored_B.reshape(-1, *[1] * (mirrored.dim() - 1))
            changed[name][..., places] = torch.where(chosen, mirrored, batch[name][..., places])
        batch.update(changed)

    def _mirror(self, points: Tensor) -> Tensor:
        """Return the images of points whose numbers x, y, x, y, ... lie in the last dimension."""
        x, y = points[..., 0::2] - self._x, points[..., 1::2] - self._y
        along = 2 * (x * self._dx + y * self._dy)
        return torch.stack([along * self._dx - x + self._x, along * self._dy - y + self._y], -1).flatten(-2)


def _refuse_pictures(change: str, spec: DataSpec) -> None:
    if cameras := sorted(spec.with_role("image")):
        raise DataError(
            f"augmentation {change} changes numbers and not pictures, and the data has {', '.join(cameras)}; "
            "leave it out, or train without cameras"
        )


def require_mirror(mirror: Any) -> dict[str, list[Any]]:
    """Return a line and points, or say what they should be."""
    shown = "{line: [[0, 0], [0, 1]], points: [[hand_x, hand_y], [left_x, left_y, right_x, right_y]]}"
    if not isinstance(mirror, Mapping) or set(mirror) != {"line", "points"}:
        raise DataError(f"augmentation mirror takes a line and points, such as {shown}, got {mirror!r}")
    line, points = mirror["line"], mirror["points"]
    is_line = _is_list(line) and len(line) == 2 and all(_is_list(point) and len(point) == 2 for point in line)
    if not is_line or not all(isinstance(number, int | float) for point in line for number in point):
        raise DataError(f"augmentation mirror takes a line through two points, such as {shown}, got {line!r}")
    if list(line[0]) == list(line[1]):
        raise DataError(f"augmentation mirror takes a line through two points, and {line!r} is one point")
    if not _is_list(points) or not all(_is_list(names) and len(names) in (2, 4) for names in points):
        raise DataError(f"augmentation mirror takes points of two names each, or of four, such as {shown}")
    return {"line": [list(point) for point in line], "points": [list(names) for names in points]}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def require_pairs(pairs: Any) -> list[list[str]]:
    """Return pairs of names, or say what they should be."""
    if not _is_list(pairs) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise DataError(f"augmentation turn takes pairs of names, such as [[hand_x, hand_y], [dx, dy]], got {pairs!r}")
    return [list(pair) for pair in pairs]
