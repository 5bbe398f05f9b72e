"""Which samples a step takes: pure arithmetic on (seed, step, rank, micro-batch), with nothing to save.

All ranks and micro-batches cut pieces from one endless row of positions. Step `s` owns the `G` positions from `s * G`
on (G is the global batch); position `p` is sample `permutation(seed, p // N)[p % N]` of a dataset of `N`. Batches may
straddle the end of an epoch, so no sample is lost and every rank takes equally many steps.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from etude.errors import DataError
from etude.protocols import Place
from etude.rng import STREAM_ORDER, STREAM_SAMPLE, fold, fold_array

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]

_CACHED_KEYS = 1 << 20  # computing keys batch by batch costs 8 us a time; 8 MB and 10 ms per epoch are cheaper
_CACHED_EPOCHS = 2  # a batch at the edge needs two; more would cost 8 bytes per sample each


def micro_starts(place: Place, step: int) -> range:
    """Return the first position of each micro-batch of one rank in one step.

    Micro-batches of all ranks are interleaved, so every split of a global batch covers the same positions.
    """
    first = step * place.global_batch + place.rank * place.batch_size
    return range(first, first + place.global_batch, place.world * place.batch_size)


def permutation(length: int, seed: int, epoch: int) -> Indices:
    """Return the order of one epoch, a function of (length, seed, epoch) only."""
    generator = torch.Generator().manual_seed(fold(seed, STREAM_ORDER, epoch))
    order: Indices = torch.randperm(length, generator=generator).numpy()
    return order


class Order:
    """Turn positions into sample indices and the random key of each sample."""

    def __init__(self, length: int, *, seed: int, shuffle: bool = True, stream: int = STREAM_SAMPLE) -> None:
        if length < 1:
            raise DataError("the dataset is empty; training needs at least one sample")
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._stream = stream
        self._epochs: dict[int, tuple[Indices, int, Keys | None]] = {}

    def epoch(self, number: int) -> tuple[Indices, int, Keys | None]:
        """Return the order of one epoch, the key that the keys of its samples extend, and those keys if they are few.

        The arrays are shared and must not be changed.
        """
        found = self._epochs.get(number)
        if found is None:
            order = permutation(self.length, self._seed, number) if self._shuffle else np.arange(self.length)
            key = fold(self._seed, self._stream, number)
            found = order, key, fold_array(key, order) if self.length <= _CACHED_KEYS else None
            while len(self._epochs) >= _CACHED_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = found
        return found

    def at(self, start: int, count: int) -> tuple[Indices, Keys]:
        """Return the sample indices at `count` positions from `start` on, and their keys."""
        number, offset = divmod(start, self.length)
        if offset + count <= self.length:
            return self.within(number, offset, offset + count)
        parts = []
        while count:
            taken = min(count, self.length - offset)
            parts.append(self.within(number, offset, offset + taken))
            number, offset, count = number + 1, 0, count - taken
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def within(self, number: int, start: int, end: int) -> tuple[Indices, Keys]:
        """Return the sample indices and keys of a piece of one epoch, as copies that the caller may change."""
        order, key, keys = self.epoch(number)
        indices = order[start:end].copy()
        return indices, fold_array(key, indices) if keys is None else keys[start:end].copy()
