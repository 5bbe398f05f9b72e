"""`StreamData`: whatever can only be iterated, and lists of ready-made batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate

from etude.data.fetch import Collate, Placed
from etude.data.passes import Passes, begin_pass, log, open_pass
from etude.errors import DataError
from etude.rng import STREAM_EVALUATE, STREAM_SAMPLE, fold, seed_everything
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.types import DataSpec


class StreamData(Placed):
    """Serve an iterable: item after item, pass after pass, micro-batches dealt out to the ranks in turn.

    Every rank reads the whole stream, so the source must not shard itself. A list of ready-made batches is addressed
    directly and served in order. Any other source is read up to the first step asked for, which is exact but takes
    time; a source with `seek(position)`, where position counts items over all passes, starts there at once. A
    generator function that draws from the global generators gives the same items on resume; one that keeps a
    generator of its own must offer `set_epoch(epoch)` or be seeded by itself. A source with `set_epoch` is told before
    each pass. `take` leaves the global generators changed.

    Args:
        source: An iterable, an iterable dataset, or a function that returns a new iterator for each pass.
        batched: Whether items are ready-made micro-batches rather than samples.
        collate: Joins a list of samples into a batch; torch's default if None.
        spec: Names, shapes and statistics of the features, for policies built from them.
    """

    def __init__(
        self,
        source: Any,
        *,
        batched: bool = False,
        collate: Collate | None = None,
        spec: DataSpec | None = None,
    ) -> None:
        readable = isinstance(source, Iterable) or callable(source) or _is_row(source)
        if isinstance(source, str | bytes) or not readable:
            raise DataError(f"StreamData needs an iterable or a function that returns one, got {type(source).__name__}")
        self.source = source
        self.spec: DataSpec | None = spec if spec is not None else getattr(source, "spec", None)
        self._batched = batched
        self._collate = collate or default_collate
        name = getattr(source, "__name__", "<")
        self._name = type(source).__name__ if name.startswith("<") else name  # "<lambda>" tells nobody anything
        # None unless batches lie ready in a row.
        self._row: Sequence[Any] | None = source if batched and _is_row(source) else None
        if self._row is not None and not len(self._row):
            raise DataError("the list of batches is empty; training needs at least one batch")
        self._passes: Passes | None = None
        self._last: tuple[int, list[Any]] = (-1, [])
        self._stride, self._rank, self._micros, self._length = 1, 0, 1, 0

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        self.close()
        self._place = place
        self._rank, self._stride, self._micros = place.rank, place.world, place.accumulate
        for asked, key in ((place.prefetch_factor is not None, "prefetch_factor"), (place.pin_memory, "pin_memory")):
            if asked:
                raise DataError(
                    f"{self._name} is read in the training process as it comes, where nothing is made ahead or pinned; "
                    f"leave out {key}"
                )
        if self._row is not None:
            self._length = len(self._row)
            return
        if place.num_workers:
            log.warning("%s is read in the training process; num_workers serves datasets and loaders", self._name)
        self._passes = Passes(self.source, seed=place.seed, per_step=self._per_step(place), name=self._name)

    def take(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches of one optimizer step."""
        row = self._row
        if row is not None:
            if self._micros == 1 and self._length:
                return [row[(step * self._stride + self._rank) % self._length]]
            return [row[number % self._length] for number in self._numbers(step)]
        if step == self._last[0]:
            return self._last[1]
        place = self.place
        assert self._passes is not None
        items = self._passes.step(step)
        if self._batched:
            micros = items[place.rank :: place.world]
        else:
            micros = [
                self._join(items[start : start + place.batch_size], step * place.global_batch + start)
                for start in range(place.rank * place.batch_size, len(items), place.world * place.batch_size)
            ]
        self._last = step, micros
        return micros

    def ids(self, step: int) -> Sequence[Any]:
        """Return the numbers of the items in each micro-batch, counted over all passes."""
        size = 1 if self._batched else self.place.batch_size
        return [list(range(number * size, (number + 1) * size)) for number in self._numbers(step)]

    def epochs(self, step: int) -> float:
        """Return how many passes `step` optimizer steps amount to; whole passes only if the source has no length."""
        items = step * self._per_step(self.place)
        if self._row is not None:
            return items / self._length
        assert self._passes is not None
        return self._passes.epochs(items)

    def evaluation_batches(self, place: Place, limit: int | None = None) -> Iterator[Any]:
        """Yield this rank's batches of one pass of at most `limit`, in order; the last may be short."""
        key = fold(place.seed, STREAM_EVALUATE)
        begin_pass(self.source, 0, key)
        if callable(seek := getattr(self.source, "seek", None)):
            seek(0)
        iterator = open_pass(self.source)
        for number in range(limit) if limit is not None else count():
            items = list(islice(iterator, 1 if self._batched else place.batch_size))
            if not items:
                if not number:
                    raise DataError(f"{self._name} gave nothing to evaluate; if it can be read once, pass a function")
                return
            if number % place.world == place.rank:
                yield items[0] if self._batched else self._join(items, number * place.batch_size, key)

    def close(self) -> None:
        """Let go of the iterator."""
        self._passes, self._last = None, (-1, [])

    def _per_step(self, place: Place) -> int:
        return place.accumulate * place.world if self._batched else place.global_batch

    def _numbers(self, step: int) -> range:
        place = self.place
        first = step * place.accumulate * place.world + place.rank
        return range(first, first + place.accumulate * place.world, place.world)

    def _join(self, samples: list[Any], position: int, key: int | None = None) -> Any:
        if self._collate is not default_collate:
            seed_everything(fold(self.place.seed if key is None else key, STREAM_SAMPLE, position, 1))
        try:
            return self._collate(samples)
        except Exception as error:
            raise DataError(
                f"could not join items {position} to {position + len(samples) - 1} into a batch ({error}); "
                "samples of one batch need one shape; pad them, or give a collate function"
            ) from error


def _is_row(source: Any) -> bool:
    # torch's Dataset has a __getitem__ that only raises, so iterable datasets must be told apart.
    addressable = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return addressable and not isinstance(source, IterableDataset | Mapping)
