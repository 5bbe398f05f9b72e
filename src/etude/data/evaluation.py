"""One ordered pass for evaluation: the same batches whatever the number of ranks or workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, tee
from typing import Any

from etude.data.coerce import as_data
from etude.data.fetch import Request
from etude.data.indexed import IndexedData
from etude.data.stream import StreamData
from etude.errors import DataError
from etude.types.protocols import Data, Place


def evaluation_batches(source: Any, place: Place, limit: int | None = None) -> Iterator[Any]:
    """Yield this rank's share of one pass: batches `rank, rank + world, ...` of at most `limit` in all.

    Nothing is shuffled, the last batch may be short, and samples draw from the evaluation stream of the seed. Ranks may
    get unequally many batches, so the caller must not synchronise per batch. The global generators are left changed.

    Args:
        source: Anything `as_data` accepts; of a data module, its `val_dataloader()`.
        place: The rank, and how large a batch is.
        limit: At most this many batches over all ranks; None takes all.
    """
    # A module that holds nothing out was given to be evaluated on whole.
    split = "val" if getattr(source, "has_validation", callable(getattr(source, "val_dataloader", None))) else "train"
    data = as_data(source, split=split)
    data = getattr(data, "evaluation_source", data)
    if isinstance(data, IndexedData):
        return _indexed(data, place, limit)
    if isinstance(data, StreamData):
        return data.evaluation_batches(place, limit)
    return _batches(data, place, limit)


def _indexed(data: IndexedData, place: Place, limit: int | None) -> Iterator[Any]:
    requests: Iterator[Request] = islice(data.evaluation_requests(place), place.rank, limit, place.world)
    number = data.num_workers(place)
    if not number:
        for indices, keys in requests:
            yield data.fetch(indices, keys)
        return
    requests, coming = tee(requests)
    with closing(data.start_workers(place, number)) as workers:
        workers.start(coming)
        for _ in requests:
            yield workers.next()


def _batches(data: Data, place: Place, limit: int | None) -> Iterator[Any]:
    """Evaluate on Data that only knows `take`: its steps, unshuffled and one batch each, up to one epoch."""
    data.open(replace(place, rank=0, world=1, accumulate=1, shuffle=False))
    try:
        if limit is None and data.epochs(1) <= 0:
            raise DataError(f"{type(data).__name__} does not say how long an epoch is; limit the evaluation batches")
        step = 0
        while data.epochs(step) < 1.0 and (limit is None or step < limit):
            batch = data.take(step)[0]
            if step % place.world == place.rank:
                yield batch
            step += 1
    finally:
        data.close()
