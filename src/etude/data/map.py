"""`MapData`: any dataset with `__len__` and `__getitem__`, addressed by (seed, step)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.data.fetch import Collate, Fetch, Request
from etude.data.indexed import IndexedData
from etude.data.order import Order, micro_starts
from etude.errors import DataError
from etude.rng import STREAM_EVALUATE, fold, fold_array
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.types import DataSpec


class MapData(IndexedData):
    """Serve a map-style dataset: the same batches for any number of workers, starting at any step.

    A dataset that offers `gather(indices, keys) -> batch` is read a batch at a time; see `Fetch` for the other roads.

    Args:
        dataset: Anything with `__len__` and `__getitem__` or `gather`.
        collate: Joins a list of samples into a batch; torch's default if None.
        spec: Names, shapes and statistics of the features; the dataset's own if None.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, *, spec: DataSpec | None = None) -> None:
        if not hasattr(dataset, "__len__"):
            raise DataError(f"{type(dataset).__name__} has no __len__; wrap what can only be iterated in StreamData")
        super().__init__(Fetch(dataset, collate), dataset, spec)
        self.length = len(dataset)
        if self.length < 1:
            raise DataError(f"the dataset {type(dataset).__name__} is empty; training needs at least one sample")
        self._order: Order | None = None

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        super().open(place)
        self._order = Order(self.length, seed=place.seed, shuffle=place.shuffle, version=place.order_version)

    def requests(self, step: int) -> list[Request]:
        """Return indices and keys of each micro-batch of this rank in one step."""
        place = self.place
        assert self._order is not None
        at, size = self._order.at, place.batch_size
        return [at(start, size) for start in micro_starts(place, step)]

    def evaluation_requests(self, place: Place) -> Iterator[Request]:
        """Return one ordered pass over all samples; the last batch may be short."""
        key = fold(place.seed, STREAM_EVALUATE)
        for start in range(0, self.length, place.batch_size):
            indices = np.arange(start, min(start + place.batch_size, self.length))
            yield indices, fold_array(key, indices)

    def epochs(self, step: int) -> float:
        """Return how many epochs `step` optimizer steps amount to."""
        return step * self.place.global_batch / self.length
