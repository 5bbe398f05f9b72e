"""Which samples a step takes: pure arithmetic on (seed, step, rank, micro-batch), with nothing to save.

All ranks and micro-batches cut pieces from one endless row of positions. Step `s` owns the `G` positions from `s * G`
on (G is the global batch); position `p` is sample `order(seed, p // N)[p % N]` of a dataset of `N`. Batches may
straddle the end of an epoch, so no sample is lost and every rank takes equally many steps.

The order of a small dataset is a random permutation. That of a large one is never written down: `shuffled` tells the
sample at any place of it, so that an epoch of a billion samples costs neither memory nor a start.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from etude.errors import DataError
from etude.rng import STREAM_ORDER, STREAM_SAMPLE, fold, fold_array
from etude.types.protocols import ORDER_VERSION, Place

Indices = NDArray[np.int64]
Keys = NDArray[np.uint64]

_WHOLE = 1 << 16  # samples whose permutation is drawn at once, in 1 ms: every order is then equally likely
_BLOCK = 1 << 14  # places worked out together: 60 ns each, where a batch of 64 would take 3 us each
_CACHED_BLOCKS = 2  # a batch at an edge needs two
_CACHED_KEYS = 1 << 20  # computing keys batch by batch costs 8 us a time; 8 MB and 10 ms per epoch are cheaper
_ROUNDS = 8  # with 4, neighbours in an epoch are visibly related (chi-square p below 1e-100); with 6, barely
_ODD = np.uint64(0xBF58476D1CE4E5B9)


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


def shuffled(places: Indices, length: int, seed: int, epoch: int) -> Indices:
    """Return the samples at some places of an epoch: a one-to-one function of the place, without the other places.

    A Feistel network over the smallest power of two that holds the length; what falls outside goes through it again.
    """
    samples = places.astype(np.uint64)
    todo = np.arange(len(samples))
    while len(todo):
        samples[todo] = _exchange(samples[todo], (length - 1).bit_length(), _round_keys(seed, epoch))
        todo = todo[samples[todo] >= length]
    return samples.astype(np.int64)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(fold(seed, STREAM_ORDER, epoch, number)) for number in range(_ROUNDS))


def _exchange(values: Keys, bits: int, keys: tuple[np.uint64, ...]) -> Keys:
    """Map values below `2 ** bits` one to one: each half of the bits in turn is changed by what the other one is."""
    left_bits, right_bits = bits - bits // 2, bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    for key in keys:
        mixed = ((right ^ key) * _ODD) >> np.uint64(64 - left_bits)
        left, right = right, left ^ mixed
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


class Order:
    """Turn positions into sample indices and the random key of each sample.

    Args:
        length: How many samples there are.
        seed: Decides the order of every epoch.
        shuffle: Whether epochs have an order of their own, or that of the dataset.
        stream: Which random stream the samples' keys belong to.
        version: `Place.order_version`.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        shuffle: bool = True,
        stream: int = STREAM_SAMPLE,
        version: int = ORDER_VERSION,
    ) -> None:
        if length < 1:
            raise DataError("the dataset is empty; training needs at least one sample")
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._stream = stream
        self._is_whole = shuffle and (version == 1 or length <= _WHOLE)
        self._block = length if self._is_whole else _BLOCK
        self._blocks: dict[tuple[int, int], tuple[Indices, int, Keys | None]] = {}

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
        return _joined(parts)

    def within(self, number: int, start: int, end: int) -> tuple[Indices, Keys]:
        """Return the sample indices and keys of a piece of one epoch, as copies that the caller may change."""
        first, size = start // self._block, self._block
        if end <= (first + 1) * size:
            return self._cut(number, first, start - first * size, end - first * size)
        blocks = range(first, -(-end // size))
        return _joined([self._cut(number, at, max(0, start - at * size), min(size, end - at * size)) for at in blocks])

    def _cut(self, number: int, at: int, start: int, end: int) -> tuple[Indices, Keys]:
        order, key, keys = self._find_block(number, at)
        indices = order[start:end].copy()
        return indices, fold_array(key, indices) if keys is None else keys[start:end].copy()

    def _find_block(self, number: int, at: int) -> tuple[Indices, int, Keys | None]:
        """Return a block of an epoch, the key that its samples' keys extend, and those keys if they are few."""
        found = self._blocks.get((number, at))
        if found is None:
            places = np.arange(at * self._block, min((at + 1) * self._block, self.length))
            if self._is_whole:
                places = permutation(self.length, self._seed, number)
            elif self._shuffle:
                places = shuffled(places, self.length, self._seed, number)
            key = fold(self._seed, self._stream, number)
            found = places, key, fold_array(key, places) if len(places) <= _CACHED_KEYS else None
            while len(self._blocks) >= _CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number, at] = found
        return found


def _joined(parts: list[tuple[Indices, Keys]]) -> tuple[Indices, Keys]:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
