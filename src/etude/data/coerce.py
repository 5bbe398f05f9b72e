"""`as_data`: accept what people have at hand as Data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from etude.data.columns import Columns, Pairs
from etude.data.loader import LoaderData, iterates_its_own_way
from etude.data.map import MapData
from etude.data.stream import StreamData
from etude.errors import DataError
from etude.types.protocols import Data

_ACCEPTED = (
    "a dataset with __len__ and __getitem__, a DataLoader, an iterable or a function that returns one, "
    "a dictionary of tensors, a pair (X, Y) of them, a data module with train_dataloader(), or an object with open "
    "and take"
)


def as_data(source: Any, *, split: str = "train") -> Data:
    """Return `source` as Data.

    - Data stays as it is; a DataLoader keeps its batches, order and workers.
    - A data module gives its `train_data()` or `train_dataloader()` (with `split="val"` its `eval_data()` or
      `val_dataloader()`).
    - A dictionary of tensors or arrays is a dataset of rows.
    - A pair `(X, Y)` of tensors or arrays is features and targets, in batches `[x, y]`.
    - What has `__len__` and `__getitem__` is a dataset of samples; lists too. For a list of ready-made batches say
      `StreamData(batches, batched=True)`.
    - Other iterables, and functions that return one, are streams of samples, batched here.
    """
    if callable(getattr(source, "take", None)) and callable(getattr(source, "open", None)):
        data: Data = source
        return data
    if isinstance(source, DataLoader):
        return StreamData(source, batched=True) if iterates_its_own_way(source) else LoaderData(source)
    own = getattr(source, "train_data" if split == "train" else "eval_data", None)
    if callable(own):
        return as_data(own())
    if callable(getattr(source, f"{split}_dataloader", None)):
        return as_data(_loader_of(source, split))
    if isinstance(source, Mapping):
        return MapData(Columns(source))
    if _is_pair(source):
        return MapData(Pairs(*source))
    if isinstance(source, str | bytes | type) or source is None:
        raise _refused(source)
    if isinstance(source, IterableDataset):
        return StreamData(source)
    if hasattr(source, "__len__") and (hasattr(source, "__getitem__") or hasattr(source, "gather")):
        return MapData(source)
    if isinstance(source, Iterable) or callable(source):
        return StreamData(source)
    raise _refused(source)


def _is_pair(source: Any) -> bool:
    """Tell whether something is features and targets rather than two samples."""
    pair = type(source) is tuple and len(source) == 2
    return pair and all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in source)


def held_out(source: Any) -> Any:
    """Return a data module that holds samples out for validation, to evaluate on; None for anything else."""
    return source if getattr(source, "has_validation", False) is True else None


def _loader_of(module: Any, split: str) -> Any:
    for name, arguments in (("prepare_data", ()), ("setup", ("fit",))):
        hook = getattr(module, name, None)
        if callable(hook):
            hook(*arguments)
    loader = getattr(module, f"{split}_dataloader")()
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"{type(module).__name__}.{split}_dataloader() must return one DataLoader, got {type(loader).__name__}"
        )
    return loader


def _refused(source: Any) -> DataError:
    found = f"the class {source.__name__}, not an object" if isinstance(source, type) else repr(type(source).__name__)
    return DataError(f"cannot train on {found}; data may be {_ACCEPTED}")
