"""Random numbers as a function of sample keys, for datasets that augment a whole batch in one `gather`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from etude.data.order import Keys
from etude.rng import fold_array


def uniforms(keys: Keys, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
    """Return numbers in [0, 1) of shape (B, *shape); row b depends on `keys[b]` alone."""
    count = math.prod(shape)
    # 53 bits are what a float64 holds exactly.
    bits = fold_array(keys[:, None], np.arange(count)) >> np.uint64(11)
    return (bits.astype(np.float64) * 2.0**-53).reshape(len(keys), *shape)


def normals(keys: Keys, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
    """Return standard normal numbers of shape (B, *shape); row b depends on `keys[b]` alone (Box-Muller)."""
    count = math.prod(shape)
    pairs = uniforms(keys, (2, (count + 1) // 2))
    radius = np.sqrt(-2.0 * np.log1p(-pairs[:, 0]))
    angle = 2.0 * np.pi * pairs[:, 1]
    values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return values[:, :count].reshape(len(keys), *shape)
