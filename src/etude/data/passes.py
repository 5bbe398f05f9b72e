"""Read an iterable pass after pass, step by step, so that step `s` gives the same items however one came there."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from etude.data.generators import Generators
from etude.data.workers import keep_deaths_quiet
from etude.errors import DataError
from etude.rng import STREAM_ORDER, STREAM_SAMPLE, fold, seed_everything

log = logging.getLogger("etude.data")


class Passes:
    """The items of an iterable, grouped by step; at its end a new pass begins.

    The global generators are seeded by (seed, epoch) when a pass begins and by (seed, step) before the items of a step
    are drawn, so randomness inside a generator is exact on resume too: skipped steps draw what they drew before. A
    source with `seek(position)` is told where to begin before each pass; position counts items over all passes.

    Args:
        source: An iterable, or a function that returns a new iterable for each pass.
        seed: The root seed.
        per_step: Items that one step takes, over all ranks.
        name: What to call the source in messages.
        quiet: Say nothing when items are read past, because they cost little.
    """

    def __init__(self, source: Any, *, seed: int, per_step: int, name: str, quiet: bool = False) -> None:
        self._source = source
        self._seed = seed
        self._per_step = per_step
        self._name = name
        self._quiet = quiet
        self._size = size_of(source)
        self._once = isinstance(source, Iterator)
        seek = getattr(source, "seek", None)
        self._seek: Callable[[int], Any] | None = seek if callable(seek) else None
        self._step = 0
        self._iterator: Iterator[Any] | None = None
        self._epoch = -1
        self._begun_at = 0
        self._read = 0
        self._ends: list[int] = []

    def step(self, step: int) -> list[Any]:
        """Return all items of one step, for every rank alike."""
        if step != self._step:
            self._go_to(step)
        return self._read_step()

    def epochs(self, items: int) -> float:
        """Return how many passes so many items amount to.

        Exact for a source with a length. Otherwise whole passes count, once an item after their end has been read.
        """
        if self._size:
            return items / self._size
        return float(bisect_left(self._ends, items))

    def _read_step(self) -> list[Any]:
        self._seed_items()
        items = [self._next() for _ in range(self._per_step)]
        self._step += 1
        return items

    def _seed_items(self) -> None:
        # A function of the position alone, wherever the last pass began: seeking must lead to the same draws.
        offset = self._read - self._step * self._per_step
        seed_everything(fold(self._seed, STREAM_SAMPLE, self._step, offset))

    def _next(self) -> Any:
        while True:
            if self._iterator is None:
                self._begin()
                self._seed_items()
            try:
                item = next(self._iterator)  # type: ignore[arg-type]  # _begin has set it
            except StopIteration:
                self._finish()
                continue
            except DataError:
                raise
            except Exception as error:
                raise DataError(
                    f"reading item {self._read} of {self._name} failed: {type(error).__name__}: {error}"
                ) from error
            self._read += 1
            return item

    def _begin(self) -> None:
        self._epoch += 1
        self._begun_at = self._read
        begin_pass(self._source, self._epoch, fold(self._seed, STREAM_ORDER, self._epoch))
        if self._seek is not None:
            self._seek(self._read)
        self._iterator = open_pass(self._source)

    def _finish(self) -> None:
        steps = self._read // self._per_step
        self._iterator = None
        if self._read == 0:
            raise DataError(f"{self._name} is empty; training needs at least one item")
        if self._once or self._read == self._begun_at:
            why = "it can be read only once" if self._once else "another pass over it gave nothing"
            raise DataError(
                f"{self._name} ended after {self._read} items, enough for {steps} steps, and {why}; "
                "pass a list, a dataset, or a function that returns a new iterator"
            )
        if not self._size:
            self._ends.append(self._read)

    def _go_to(self, step: int) -> None:
        if self._seek is not None:
            self._step, self._read = step, step * self._per_step
            self._epoch = self._read // self._size - 1 if self._size else -1
            self._begin()
            return
        if step < self._step:
            if self._once:
                raise DataError(
                    f"{self._name} can be read only once, so it cannot go back from step {self._step} to {step}; "
                    "pass a list, a dataset, or a function that returns a new iterator"
                )
            self._iterator, self._epoch, self._read, self._step, self._ends = None, -1, 0, 0, []
        if not self._quiet:
            hint = "a source with seek(position) would start there at once"
            past = (step - self._step) * self._per_step
            log.warning("%s: reading past %d items to reach step %d; %s", self._name, past, step, hint)
        while self._step < step:
            self._read_step()


def size_of(source: Any) -> int | None:
    """Return the length of an iterable, or None if it has none."""
    try:
        return len(source)
    except TypeError:
        return None


def begin_pass(source: Any, epoch: int, key: int) -> None:
    """Tell a source which epoch begins, and seed the global generators and those it holds."""
    parts = [source, getattr(source, "dataset", None), getattr(source, "sampler", None)]
    for part in parts:
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    Generators(*parts).seed(key)


def open_pass(source: Iterable[Any] | Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Begin one pass over an iterable, or over what a function returns."""
    if not isinstance(source, Iterable) and callable(source):
        source = source()
    iterator = iter(source)
    if isinstance(source, DataLoader):
        keep_deaths_quiet()
    return iterator
