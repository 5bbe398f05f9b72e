"""Batches by number where transformers expects a loader: resuming reads the step and skips nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from etude.data.coerce import as_data
from etude.data.passes import size_of
from etude.data.stream import StreamData
from etude.errors import DataError
from etude.types import batch_length
from etude.types.protocols import Data, Place


def ready_made(loader: Any, name: str = "train_loader") -> Data:
    """Return a loader as Data: what it yields are batches, and nothing batches them again.

    What may just as well yield samples (a dataset, a list of rows) is refused, with what to write instead.

    Args:
        loader: A DataLoader, a list of batches, any other iterable of batches, or a function that returns one.
        name: What the loader was given as, for messages.
    """
    if isinstance(loader, DataLoader) or any(callable(getattr(loader, own, None)) for own in _MAKES_BATCHES):
        return as_data(loader)
    kind = type(loader).__name__
    instead = "wrap it as DataLoader(data, batch_size=...)"
    if isinstance(loader, IterableDataset):
        raise DataError(f"{name} is a {kind}, which may yield samples or batches: {instead}, with None for batches")
    if isinstance(loader, Dataset | Mapping | Tensor | str) or hasattr(loader, "column_names"):
        raise DataError(f"{name} is a {kind}, which holds samples and makes no batches: {instead}")
    if not isinstance(loader, Iterable) and not callable(loader):
        rows = ", which holds samples and makes no batches" if hasattr(loader, "__getitem__") else ""
        raise DataError(f"{name} is a {kind}{rows}; it must be a DataLoader or an iterable of batches: {instead}")
    if isinstance(loader, list | tuple) and loader and not _is_batch(loader[0]):
        raise DataError(
            f"{name} is a {kind} whose first item looks like one sample, not like a batch: {instead}, with None if "
            "these are batches after all"
        )
    return StreamData(loader, batched=True)


_MAKES_BATCHES = ("open", "train_data", "train_dataloader")
"""What Etude's own Data and data modules of any make have; those know how to batch."""


def _is_batch(item: Any) -> bool:
    """Tell whether an item can be a batch: its arrays have one first dimension, or it has lists in place of arrays."""
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, tuple | list) else [item]
    shapes = [tuple(part.shape) for part in parts if hasattr(part, "shape")]
    if shapes:
        return all(shapes) and len({shape[0] for shape in shapes}) == 1
    return not isinstance(item, Mapping | tuple) or any(isinstance(part, list | tuple | Mapping) for part in parts)


class NumberedBatches(DataLoader[int]):
    """One rank's micro-batches, addressed by (seed, number); as a loader it only counts them.

    transformers fast-forwards a loader to resume. Numbers cost nothing to skip, and the batches of a step are fetched
    by their numbers, so nothing but the step decides what they are.

    Args:
        source: What `ready_made` accepts.
        place: The rank; `accumulate` must be 1, for batches are numbered one by one.
    """

    def __init__(self, source: Any, place: Place) -> None:
        self.source, self.seed = source, place.seed
        self.data = ready_made(source)
        self.data.open(place)
        own = batch_length(source[0]) if isinstance(source, list | tuple) else getattr(source, "batch_size", None)
        self.batch_length: int = own or place.batch_size
        """Samples in a full batch."""
        share = self.data.epochs(1)
        # The tolerance keeps 1 / (1 / 3) from becoming four batches.
        self.per_epoch = math.ceil(1 / share - 1e-9) if share else None
        """Batches of this rank in one epoch; None if the source has no length."""
        super().__init__(range(self.per_epoch or sys.maxsize), batch_size=1)  # type: ignore[arg-type]  # any sequence

    def __len__(self) -> int:
        if self.per_epoch is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return self.per_epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # what transformers makes of it is never read
        return iter(())

    def numbers(self, step: int, accumulate: int, count: int) -> range:
        """Return the numbers of the `count` batches of one step; the last step of an epoch may have fewer than others.

        This is how transformers cuts epochs into steps, kept so that its step counts and schedules stay what they are.
        """
        if self.per_epoch is None:
            first = step * accumulate
        else:
            epoch, within = divmod(step, -(-self.per_epoch // accumulate))
            first = epoch * self.per_epoch + within * accumulate
        return range(first, first + count)

    def fetch(self, numbers: range) -> list[Any]:
        """Return the batches of these numbers."""
        return [self.data.take(number)[0] for number in numbers]

    def ids(self, number: int) -> Any:
        """Return the sample ids of one batch."""
        return self.data.ids(number)[0]

    @property
    def num_samples(self) -> int:
        """Samples in one epoch, as far as one can tell."""
        size = size_of(getattr(self.source, "dataset", None))
        return size if size is not None else (self.per_epoch or 0) * self.batch_length

    def close(self) -> None:
        """Release workers and files."""
        self.data.close()


class EvaluationBatches:
    """One ordered pass over ready-made batches that come in no DataLoader; every rank reads them all."""

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed

    def __iter__(self) -> Iterator[Any]:
        yield from self._data.evaluation_batches(Place(self._seed))
