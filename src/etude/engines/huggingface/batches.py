"""Batches by number where transformers expects a loader: resuming reads the step and skips nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from etude.data.coerce import as_data
from etude.data.passes import size_of
from etude.protocols import Place


class NumberedBatches(DataLoader[int]):
    """One rank's micro-batches, addressed by (seed, number); as a loader it only counts them.

    transformers fast-forwards a loader to resume. Numbers cost nothing to skip, and the batches of a step are fetched
    by their numbers, so nothing but the step decides what they are.

    Args:
        source: A DataLoader, a dataset, or anything else that `etude.data.as_data` accepts.
        place: The rank; `accumulate` must be 1, for batches are numbered one by one.
    """

    def __init__(self, source: Any, place: Place) -> None:
        self.source, self.seed = source, place.seed
        self.data = as_data(source)
        self.data.open(place)
        self.batch_length: int = getattr(source, "batch_size", None) or place.batch_size
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

    def take(self, numbers: range) -> list[Any]:
        """Return the batches of these numbers."""
        return [self.data.take(number)[0] for number in numbers]

    def ids(self, number: int) -> Any:
        """Return the sample ids of one batch."""
        return self.data.ids(number)[0]

    @property
    def num_samples(self) -> int:
        """Samples in one epoch, as far as one can tell."""
        size = size_of(getattr(self.source, "dataset", self.source))
        return size if size is not None else (self.per_epoch or 0) * self.batch_length

    def close(self) -> None:
        """Release workers and files."""
        self.data.close()
