"""Turn samples about an axis: where a task looks the same from all sides, one demonstration shows it from all.

Shape letters: B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        if cameras := sorted(spec.with_role("image")):
            raise DataError(
                f"augmentation turn changes numbers and not pictures, and the data has {', '.join(cameras)}; "
                "leave it out, or train without cameras"
            )
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


def require_pairs(pairs: Any) -> list[list[str]]:
    """Return pairs of names, or say what they should be."""
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if not is_list or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise DataError(f"augmentation turn takes pairs of names, such as [[hand_x, hand_y], [dx, dy]], got {pairs!r}")
    return [list(pair) for pair in pairs]
