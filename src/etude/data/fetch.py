"""Turn sample indices into a batch, by the fastest road the dataset offers.

Every sample has a random stream of its own, named by its key: a function of (seed, epoch, index). Augmentation
therefore does not depend on workers, ranks or neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

from etude.data.generators import Generators
from etude.data.order import Indices, Keys
from etude.errors import DataError
from etude.rng import fold, other_states, seed_everything
from etude.types.protocols import Place

Collate = Callable[[Any], Any]
Request = tuple[Sequence[Any] | Indices, Keys]
"""Sample indices of one micro-batch and the key of each."""

_SHOWN = 8
_WATCHED = 16  # samples from which on looking whether a batch has drawn (50 us) is cheaper than seeding for each


class Fetch:
    """Make batches of a map-style dataset.

    The roads, fastest first:

    1. `dataset.gather(indices, keys)` returns a whole batch; it must draw randomness from the keys only.
    2. A tensor, an array or a `TensorDataset` is indexed at once.
    3. `dataset.__getitems__(indices)` returns a list of samples, with the generators seeded once per batch.
    4. `dataset[index]`, with the generators seeded before each sample.

    The first two need the default collate function. The generators are the global ones, which roads 3 and 4 leave
    changed, and those the dataset holds as attributes.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None, *, single: bool = False) -> None:
        self._rows: Indices | None = None
        # torch's Subset offers __getitems__ whatever it wraps, which would hide the road of the dataset inside.
        while type(dataset) is Subset:
            inner = np.asarray(dataset.indices, dtype=np.int64)
            self._rows = inner if self._rows is None else inner[self._rows]
            dataset = dataset.dataset
        self._dataset = dataset
        self._generators = Generators(dataset)
        self._draws = True if self._generators.has_own else None
        """Whether samples draw from NumPy's or Python's generators, or the dataset's own; None until one was made."""
        custom = collate is not None and collate not in (default_collate, default_convert)
        self._collate = collate or (default_convert if single else default_collate)
        self._seeds_collate = custom
        self._make = self._choose(custom, single)

    def __call__(self, indices: Sequence[Any] | Indices, keys: Keys) -> Any:
        """Return the batch of these samples."""
        if self._rows is not None:
            indices = self._rows[np.asarray(indices, dtype=np.int64)]
        return self._make(indices, keys)

    def _choose(self, custom: bool, single: bool) -> Callable[[Any, Keys], Any]:
        dataset = self._dataset
        if single:
            return self._one
        if not custom and isinstance(dataset, Tensor | np.ndarray):  # a tensor's own gather is another thing
            return self._table
        if not custom and callable(getattr(dataset, "gather", None)):
            return self._gather
        if not custom and type(dataset) is TensorDataset:
            return self._tensors
        if callable(getattr(dataset, "__getitems__", None)):
            return self._bulk
        if not hasattr(dataset, "__getitem__"):
            raise DataError(f"{_name(dataset)} has no __getitem__, which a collate function of your own needs")
        return self._each

    def _gather(self, indices: Any, keys: Keys) -> Any:
        try:
            return self._dataset.gather(np.asarray(indices), keys)
        except Exception as error:
            raise _failed(self._dataset, f"gather of samples {_shown(indices)}", error) from error

    def _table(self, indices: Any, keys: Keys) -> Any:
        return torch.as_tensor(self._dataset[np.asarray(indices)])

    def _tensors(self, indices: Any, keys: Keys) -> Any:
        rows = torch.as_tensor(indices)
        return [tensor[rows] for tensor in self._dataset.tensors]

    def _bulk(self, indices: Any, keys: Keys) -> Any:
        self._generators.seed(int(keys[0]))
        try:
            samples = self._dataset.__getitems__(_plain(indices))
        except Exception as error:
            raise _failed(self._dataset, f"samples {_shown(indices)}", error) from error
        return self._join(samples, indices, keys)

    def _each(self, indices: Any, keys: Keys) -> Any:
        pairs = list(zip(_plain(indices), keys.tolist(), strict=True))
        samples = self._undrawn(pairs) if self._draws is False and len(pairs) >= _WATCHED else None
        if samples is None:
            samples = [self._sample(index, key) for index, key in pairs]
            if self._draws is None:
                states = other_states()
                seed_everything(pairs[-1][1])
                self._draws = states != other_states()
        return self._join(samples, indices, keys)

    def _undrawn(self, pairs: list[tuple[Any, int]]) -> list[Any] | None:
        """Make samples with only torch seeded for each; None if one has drawn from another generator after all.

        Seeding NumPy and Python takes 5 us, and a dataset that draws from neither is the same without.
        """
        seed_everything(0)
        # A generator on a device is only ever set through torch.
        on_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        seed = torch.manual_seed if on_devices else torch.default_generator.manual_seed
        samples = [self._sample(index, key, seed) for index, key in pairs]
        self._draws = other_states() != _untouched()
        return None if self._draws else samples

    def _one(self, indices: Any, keys: Keys) -> Any:
        # A loader with batch_size=None: what the sampler yields is one key of the dataset, and the result is a batch.
        return self._join(self._sample(_plain(indices)[0], int(keys[0])), indices, keys)

    def _sample(self, index: Any, key: int, seed: Callable[[int], Any] | None = None) -> Any:
        (seed or self._generators.seed)(key)
        try:
            return self._dataset[index]
        except Exception as error:
            raise _failed(self._dataset, f"sample {index}", error) from error

    def _join(self, samples: Any, indices: Any, keys: Keys) -> Any:
        if self._seeds_collate:
            seed_everything(fold(int(keys[0]), 1))  # a stream of its own, not the rest of the last sample's
        try:
            return self._collate(samples)
        except Exception as error:
            remedy = "samples of one batch need one shape; pad them, or give a collate function"
            raise DataError(f"could not join samples {_shown(indices)} into a batch ({error}); {remedy}") from error


@cache
def _untouched() -> tuple[object, ...]:
    seed_everything(0)
    return other_states()


def _plain(indices: Any) -> list[Any]:
    return indices.tolist() if isinstance(indices, np.ndarray) else list(indices)


def _name(dataset: Any) -> str:
    return type(dataset).__name__


def _shown(indices: Any) -> str:
    listed = ", ".join(map(str, _plain(indices[:_SHOWN])))
    return f"[{listed}{', ...' if len(indices) > _SHOWN else ''}]"


def _failed(dataset: Any, what: str, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    return DataError(f"{_name(dataset)} failed on {what}: {type(error).__name__}: {error}")


class Placed:
    """Data that knows where it was opened."""

    _place: Place | None = None

    @property
    def place(self) -> Place:
        """Where this data was opened."""
        if self._place is None:
            raise DataError("the data is not open; call open(place) before take(step)")
        return self._place
