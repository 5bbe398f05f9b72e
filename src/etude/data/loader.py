"""`LoaderData`: a ready-made torch DataLoader, taken apart so that it too is addressed by (seed, step)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from etude.data.fetch import Fetch, Request
from etude.data.indexed import IndexedData
from etude.data.order import Indices, Keys, Order
from etude.data.passes import Passes, begin_pass, log, size_of
from etude.errors import DataError
from etude.rng import STREAM_EVALUATE, STREAM_ORDER, STREAM_SAMPLE, fold, fold_array, generators_kept
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.types import DataSpec

# Samplers whose order is decided by their generator alone, so that any epoch can be drawn without those before it.
_STATELESS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_REMEMBERED_BATCHES = 4096


class LoaderData(IndexedData):
    """Serve a DataLoader with its own batch size, collate function, workers and order.

    A shuffling loader is shuffled by (seed, epoch). Other samplers draw under generators seeded by (seed, epoch); a
    sampler of unknown make is drawn epoch after epoch up to the one asked for, so only indices are read past, never
    data. `set_epoch` is called if there is one. Batches are dealt out to the ranks in turn, so the loader must not
    shard: a DistributedSampler is replaced by the order of its dataset. `Place.batch_size` and `Place.shuffle` are
    ignored. A loader over an iterable dataset, or one that iterates in its own way, is a stream: use `as_data`.
    """

    def __init__(self, loader: DataLoader[Any], spec: DataSpec | None = None) -> None:
        if iterates_its_own_way(loader):
            raise DataError("this loader can only be iterated; use as_data(loader) or StreamData(loader, batched=True)")
        single = loader.batch_sampler is None
        super().__init__(Fetch(loader.dataset, loader.collate_fn, single=single), loader.dataset, spec)
        self.loader = loader
        if isinstance(loader.sampler, DistributedSampler):
            log.warning("the loader's %s does not shard here: ranks take turns", type(loader.sampler).__name__)
        self._plan: _Epochs | _Drawn | None = None

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        super().open(place)
        self._plan = _plan(self.loader, place)

    def requests(self, step: int) -> list[Request]:
        """Return indices and keys of each micro-batch of this rank in one step."""
        place, plan = self.place, self._plan
        assert plan is not None
        first = step * place.accumulate * place.world + place.rank
        return [plan.batch(number) for number in range(first, first + place.accumulate * place.world, place.world)]

    def evaluation_requests(self, place: Place) -> Iterator[Request]:
        """Return one ordered pass over the loader's batches."""
        plan = _plan(self.loader, place, evaluate=True)
        if isinstance(plan, _Epochs):
            yield from map(plan.batch, range(plan.batches))
            return
        key = fold(place.seed, STREAM_EVALUATE)
        begin_pass(plan.sampler, 0, key)
        for number, indices in enumerate(plan.sampler):
            yield _keyed([indices] if plan.single else indices, fold(key, number))

    def epochs(self, step: int) -> float:
        """Return how many epochs `step` optimizer steps amount to."""
        assert self._plan is not None
        return self._plan.epochs(step * self.place.accumulate * self.place.world)

    def num_workers(self, place: Place) -> int:
        """Return the loader's own number of workers, or the configured one if it has none."""
        return self.loader.num_workers or place.num_workers

    def worker_options(self) -> dict[str, Any]:
        """Return what the loader asks of its workers."""
        options = {"begin": self.loader.worker_init_fn, "context": self.loader.multiprocessing_context}
        if self.loader.prefetch_factor is not None:
            options["ahead"] = self.loader.prefetch_factor
        return options


class _Epochs:
    """Batches of epochs that can each be drawn by themselves: any batch is found at once."""

    def __init__(self, order: Order | _Draw, batch_size: int, drop_last: bool) -> None:
        length = order.length
        self.batches = length // batch_size if drop_last else -(-length // batch_size)
        if self.batches < 1:
            raise DataError(f"the loader has no batch: {length} samples, {batch_size} a batch, drop_last={drop_last}")
        self._order = order
        self._size = batch_size

    def batch(self, number: int) -> Request:
        epoch, offset = divmod(number, self.batches)
        start = offset * self._size
        return self._order.within(epoch, start, min(start + self._size, self._order.length))

    def epochs(self, batches: int) -> float:
        return batches / self.batches


class _Drawn:
    """Batches of a sampler of unknown make, drawn pass after pass; every rank draws them all."""

    def __init__(self, sampler: Any, place: Place, single: bool) -> None:
        self._per_step = place.accumulate * place.world
        self._seed = place.seed
        self.sampler = sampler
        self.single = single
        self._passes = self._begin()
        self._coming = 0
        # Workers ask for batches ahead of time, error messages ask for them afterwards.
        self._recent: dict[int, Request] = {}

    def batch(self, number: int) -> Request:
        if number not in self._recent:
            step = number // self._per_step
            if step < self._coming:
                self._passes = self._begin()
            self._coming = step + 1
            for place, indices in enumerate(self._passes.step(step), step * self._per_step):
                key = fold(self._seed, STREAM_SAMPLE, place)
                self._recent[place] = _keyed([indices] if self.single else indices, key)
            while len(self._recent) > _REMEMBERED_BATCHES + self._per_step:
                del self._recent[next(iter(self._recent))]
        return self._recent[number]

    def epochs(self, batches: int) -> float:
        return self._passes.epochs(batches)

    def _begin(self) -> Passes:
        # A copy, because a sampler may change as it draws, and we may have to begin again.
        sampler = copy.copy(self.sampler)
        if type(sampler) is BatchSampler:
            sampler.sampler = copy.copy(sampler.sampler)
        name = type(sampler).__name__
        return Passes(sampler, seed=self._seed, per_step=self._per_step, name=name, quiet=True)


def iterates_its_own_way(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader's batches are more than dataset, sampler and collate function say."""
    if isinstance(loader.dataset, IterableDataset):
        return True
    owner = next(base for base in type(loader).__mro__ if "__iter__" in vars(base))
    return owner is not DataLoader and not owner.__module__.startswith("torchdata.")


def _keyed(indices: Any, key: int) -> Request:
    listed = list(indices)
    return listed, fold_array(key, np.arange(len(listed)))


def _plan(loader: DataLoader[Any], place: Place, evaluate: bool = False) -> _Epochs | _Drawn:
    single = loader.batch_sampler is None
    batch_sampler: Any = loader.batch_sampler
    if not single and type(batch_sampler) is not BatchSampler:
        return _Drawn(batch_sampler, place, single)
    sampler: Any = loader.sampler if single else batch_sampler.sampler
    size, drop_last = (1, False) if single else (batch_sampler.batch_size, batch_sampler.drop_last)
    plain, shuffle = _plain_order(sampler, loader.dataset)
    if plain:
        length = len(loader.dataset)  # type: ignore[arg-type]  # map-style datasets have a length
        stream = STREAM_EVALUATE if evaluate else STREAM_SAMPLE
        order = Order(
            length, seed=place.seed, shuffle=shuffle and not evaluate, stream=stream, version=place.order_version
        )
        return _Epochs(order, size, drop_last)
    if type(sampler) in _STATELESS:
        draw = _Draw(sampler, place.seed, STREAM_EVALUATE if evaluate else STREAM_SAMPLE)
        return _Epochs(draw, size, drop_last)
    if isinstance(sampler, DistributedSampler):
        sampler = _unsharded(sampler)
    return _Drawn(sampler if single else BatchSampler(sampler, size, drop_last), place, single)


def _plain_order(sampler: Any, dataset: Any) -> tuple[bool, bool]:
    """Return whether a sampler takes every sample once, and whether it shuffles."""
    length = size_of(dataset)
    if type(sampler) is SequentialSampler:
        return size_of(sampler) == length, False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == length, True
    if type(sampler) is DistributedSampler:
        return size_of(sampler.dataset) == length, sampler.shuffle
    return False, False


def _unsharded(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]  # it sharded by length
    return whole


class _Draw:
    """The order of epochs as a stateless sampler gives it under generators seeded by (seed, epoch)."""

    def __init__(self, sampler: Any, seed: int, stream: int) -> None:
        self.length = len(sampler)
        self._sampler = sampler
        self._seed = seed
        self._stream = stream
        self._epochs: dict[int, Indices] = {}

    def within(self, number: int, start: int, end: int) -> tuple[Indices, Keys]:
        found = self._epochs.get(number)
        if found is None:
            with generators_kept():
                begin_pass(self._sampler, number, fold(self._seed, STREAM_ORDER, number))
                found = np.asarray(list(self._sampler), dtype=np.int64)
            while len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[number] = found
        # A sampler may draw a sample twice in an epoch; its copies are told apart by position.
        return found[start:end].copy(), fold_array(fold(self._seed, self._stream, number), np.arange(start, end))
