"""Training loaders addressed by (seed, epoch, batch), so that a resumed run needs nothing but where it was.

Lightning's progress counters say where training is; batches and their randomness follow from that alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from etude.data.loader import LoaderData, iterates_its_own_way
from etude.data.passes import begin_pass, open_pass, size_of
from etude.errors import DataError
from etude.rng import STREAM_ORDER, STREAM_SAMPLE, fold, seed_everything
from etude.types.protocols import ORDER_VERSION, Place

if TYPE_CHECKING:
    from etude.data.fetch import Request


class RankShare(LoaderData):
    """A rank's batches of a ready-made loader, epoch by epoch; every rank gets as many, the first again if need be."""

    @property
    def length(self) -> int:
        """Batches of this rank in one epoch."""
        batches = getattr(self._plan, "batches", None) or len(self.loader)
        return -(-int(batches) // self.place.world)

    def requests(self, step: int) -> list[Request]:
        """Return indices and keys of one batch, counted over all epochs."""
        plan, place = self._plan, self.place
        batches = getattr(plan, "batches", None)
        if plan is None or batches is None:
            return super().requests(step)
        epoch, number = divmod(step, self.length)
        return [plan.batch(epoch * batches + (number * place.world + place.rank) % batches)]


class AddressedLoader:
    """A DataLoader of indexed samples whose batches are found by their place, without reading those before."""

    def __init__(self, loader: DataLoader[Any], trainer: Any) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self.num_workers = loader.num_workers
        self.cycled_with: list[Any] = []
        """Loaders of one CombinedLoader that starts the shorter ones over."""
        self._trainer = trainer
        self._order_version = ORDER_VERSION
        self._share: RankShare | None = None

    @property
    def share(self) -> RankShare:
        """This rank's part of the data, opened when the first batch is asked for."""
        if self._share is None:
            trainer = self._trainer
            self._share = RankShare(_in_order(self.loader) if trainer.overfit_batches else self.loader)
            place = Place(trainer.root_seed, trainer.global_rank, trainer.world_size)
            self._share.open(replace(place, order_version=self._order_version))
        return self._share

    def __len__(self) -> int:
        return self.share.length

    def __iter__(self) -> Iterator[Any]:
        # A generator: it looks where training is when the first batch is asked for, by when Lightning has settled it.
        first = self.step_of(*place_of(self._trainer))
        for step in range(first, (first // len(self) + 1) * len(self)):
            yield self.share.take(step)[0]

    def step_of(self, epoch: int, number: int) -> int:
        """Return the place of a batch counted over all passes, of which an epoch may take several."""
        length = len(self)
        longest = max((len(other) for other in self.cycled_with), default=length)
        return epoch * -(-longest // length) * length + number

    def ids(self, epoch: int, number: int) -> list[Any]:
        """Return the sample indices of one batch."""
        return list(self.share.ids(self.step_of(epoch, number))[0])

    def close(self) -> None:
        """End the workers."""
        if self._share is not None:
            self._share.close()
        self._share = None

    def state_dict(self) -> dict[str, Any]:
        """Return how the data is ordered, and thereby tell Lightning that this loader can resume."""
        return {"order_version": self._order_version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the order of the run; the place in it follows from Lightning's progress."""
        version = state.get("order_version", 1)
        if version != self._order_version:
            self._order_version = version
            self.close()


class AddressedStream:
    """A loader that can only be iterated: begun anew each epoch under its seed, and read past to where training was.

    Every rank reads its own, as with Lightning alone.
    """

    def __init__(self, loader: Any, trainer: Any) -> None:
        self.loader = loader
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        trainer = self._trainer
        epoch, start = prefetched_place_of(trainer)
        seed, rank, number = trainer.root_seed, trainer.global_rank, 0
        begin_pass(self.loader, epoch, fold(seed, STREAM_ORDER, epoch, rank))
        iterator = open_pass(self.loader)
        while True:
            seed_everything(fold(seed, STREAM_SAMPLE, epoch, number, rank))
            try:
                batch = next(iterator)
            except StopIteration:
                if number:
                    return
                name = type(self.loader).__name__
                once = "it can be read only once" if isinstance(self.loader, Iterator) else "another pass gave nothing"
                why = once if epoch else "it is empty"
                raise DataError(
                    f"{name} has no batch for epoch {epoch}: {why}; give a DataLoader, or an iterable that begins anew"
                ) from None
            if number >= start:
                yield batch
            number += 1

    def ids(self, epoch: int, number: int) -> list[Any]:
        """Return the number of a batch within its epoch; its samples have no names."""
        return [number]

    def close(self) -> None:
        """Do nothing: the loader ends its own workers."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing; to Lightning it says that this loader can resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the place follows from Lightning's progress."""


class SizedStream(AddressedStream):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return len(self.loader)


Addressed = AddressedLoader | AddressedStream


def address(loaders: Any, trainer: Any) -> CombinedLoader:
    """Return a loader, or a collection of them as Lightning takes it, with every one of them addressed by place."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    found = [_address_one(loader, trainer) for loader in combined.flattened]
    combined.flattened = found
    if combined._mode == "max_size_cycle" and len(found) > 1:
        for loader in found:
            if isinstance(loader, AddressedLoader):
                loader.cycled_with = [other for other in found if hasattr(other, "__len__")]
    return combined


def _address_one(loader: Any, trainer: Any) -> Addressed:
    if isinstance(loader, AddressedLoader | AddressedStream):
        return loader
    if isinstance(loader, Tensor) or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise DataError(
            f"train_dataloaders holds a {type(loader).__name__}, which makes no batches, and to Lightning a list or "
            "dictionary is a collection of loaders: wrap samples as DataLoader(data, batch_size=...), and ready-made "
            "batches as DataLoader(batches, batch_size=None)"
        )
    # A loader that shards by itself (use_distributed_sampler=False) must be iterated as it is.
    indexed = isinstance(loader, DataLoader) and not iterates_its_own_way(loader)
    if indexed and size_of(loader) is not None and trainer.deals_out_batches:
        return AddressedLoader(loader, trainer)
    return AddressedStream(loader, trainer) if size_of(loader) is None else SizedStream(loader, trainer)


def place_of(trainer: Any) -> tuple[int, int]:
    """Return the epoch and the number of the batch that training takes next."""
    loop = trainer.fit_loop
    return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready


def prefetched_place_of(trainer: Any) -> tuple[int, int]:
    """Return the same before Lightning has settled its counters after a restart, as when it prefetches."""
    loop = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    if epochs.ready == epochs.processed:
        return epochs.processed, 0
    return (epochs.processed + 1, 0) if batches.is_last_batch else (epochs.processed, batches.current.ready)


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same batches, unshuffled: what `overfit_batches` asks for."""
    sampler: Any = loader.batch_sampler
    if sampler is None or not hasattr(sampler, "batch_size"):
        return loader
    batches = BatchSampler(SequentialSampler(loader.dataset), sampler.batch_size, sampler.drop_last)  # type: ignore[arg-type]
    return DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
    )  # fmt: skip
