"""What data made of indexed samples has in common: requests per step, served here or by workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch

from etude.data.fetch import Fetch, Placed, Request
from etude.data.workers import Workers
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.types import DataSpec


class IndexedData(Placed, ABC):
    """Batches of a map-style dataset; subclasses say which samples a step takes.

    `take` may leave the global random generators changed (samples are made under their own seeds), so callers that
    draw from them seed them afterwards, as the engines do.
    """

    def __init__(self, fetch: Fetch, dataset: Any, spec: DataSpec | None = None) -> None:
        self.fetch = fetch
        self.dataset = dataset
        self._spec = spec
        self._workers: Workers | None = None
        self._coming = 0
        self._last: tuple[int, list[Any]] = (-1, [])

    @abstractmethod
    def requests(self, step: int) -> list[Request]:
        """Return indices and keys of each micro-batch of this rank in one step."""

    @abstractmethod
    def evaluation_requests(self, place: Place) -> Iterator[Request]:
        """Return one ordered pass over all samples, for all ranks together."""

    @abstractmethod
    def epochs(self, step: int) -> float:
        """Return how many epochs `step` optimizer steps amount to."""

    @property
    def spec(self) -> DataSpec | None:
        """Names, shapes and statistics of the features, if the dataset knows them."""
        if self._spec is None:  # asked for late: statistics may mean reading all the data
            self._spec = getattr(self.dataset, "spec", None)
        return self._spec

    @spec.setter
    def spec(self, spec: DataSpec | None) -> None:
        self._spec = spec

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        self.close()
        self._place = place
        number = self.num_workers(place)
        if number:
            self._workers = self.start_workers(place, number)

    def take(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches of one optimizer step, from any step on."""
        if self._workers is None:
            micros = [self.fetch(indices, keys) for indices, keys in self.requests(step)]
            pin = self.place.pin_memory is True and torch.cuda.is_available()
            return [_pinned(batch) for batch in micros] if pin else micros
        if step == self._last[0]:
            return self._last[1]
        if step != self._coming or self._last[0] < 0:
            self._workers.start(chain.from_iterable(map(self.requests, count(step))))
        self._coming = -1  # after a failure the place in the stream is unknown: start anew
        workers = self._workers
        micros = [workers.next() for _ in range(self.place.accumulate)]
        self._coming, self._last = step + 1, (step, micros)
        return micros

    def ids(self, step: int) -> Sequence[Any]:
        """Return the sample indices of each micro-batch of `take(step)`."""
        return [list(map(_plain, indices)) for indices, _ in self.requests(step)]

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()
        self._workers, self._last, self._coming = None, (-1, []), 0

    def num_workers(self, place: Place) -> int:
        """Return how many worker processes to use."""
        return place.num_workers

    def worker_options(self) -> dict[str, Any]:
        """Return further arguments for `Workers`."""
        return {}

    def start_workers(self, place: Place, number: int) -> Workers:
        """Make the workers (they start with the first request)."""
        least = max(2, -(-place.accumulate // number) + 1)  # at least the whole next step
        options = {"ahead": place.prefetch_factor or least, "pin_memory": place.pin_memory, **self.worker_options()}
        return Workers(self.fetch, number, seed=place.seed, **options)


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def _plain(index: Any) -> Any:
    return index.item() if hasattr(index, "item") else index
