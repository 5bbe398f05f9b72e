"""What tells data from other data at the cost of a glance: its length, and a hash of a few of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from etude.data.columns import Columns

SAMPLED_ROWS = 64
"""Rows that are hashed, evenly spread, first and last among them: 64 pictures of 150 kB take 10 ms."""
_DEEPEST = 6


def fingerprint(data: Any) -> dict[str, Any] | None:
    """Return {"length": ..., "content": ...} of data with an order of its own; None for streams and made experience.

    A dataset may bring a `fingerprint` of its own, a text or a method that returns one. Datasets are never asked for
    samples, which may take long or have effects: what they hold in memory is looked at.
    """
    data = getattr(data, "demonstrations", data)  # what is played besides depends on the policy
    dataset = getattr(data, "dataset", None)
    if dataset is None:
        rows = getattr(data, "rows", None)
        dataset = rows if isinstance(rows, list) else None
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    digest = hashlib.sha256()
    _absorb(digest, dataset, 0)
    return {"length": len(dataset), "content": digest.hexdigest()[:32]}


def describe_change(before: Any, now: Any) -> str | None:
    """Return in words how data differs from what it was when a run was saved; None if it does not, or nobody knows."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return None
    if before.get("length") != now.get("length"):
        return f"the data has {now.get('length')} samples instead of {before.get('length')}"
    if before.get("content") != now.get("content"):
        return "the data has other content, or another order"
    return None


def _absorb(digest: Any, value: Any, depth: int) -> None:
    digest.update(f"{depth}{type(value).__name__}".encode())
    own = None if isinstance(value, Tensor | np.ndarray) else getattr(value, "fingerprint", None)
    if own is not None and not isinstance(value, type):
        digest.update(str(own() if callable(own) else own).encode())
    elif isinstance(value, Tensor | np.ndarray):
        _absorb_rows(digest, value)
    elif value is None or isinstance(value, str | bytes | int | float):
        digest.update(repr(value).encode())
    elif depth < _DEEPEST:
        for part in _parts(value, depth):
            _absorb(digest, part, depth + 1)


def _parts(value: Any, depth: int) -> Iterable[Any]:
    if isinstance(value, Columns):
        return [value.columns]
    if isinstance(value, TensorDataset):
        return value.tensors
    if isinstance(value, Subset):
        return [np.asarray(value.indices), value.dataset]
    if isinstance(value, Mapping):
        keys = list(value)
        return [len(keys), *(part for row in _places(len(keys)) for part in (str(keys[row]), value[keys[row]]))]
    if isinstance(value, list | tuple):
        return [len(value), *(value[row] for row in _places(len(value)))]
    if depth > 1 or not hasattr(value, "__dict__"):
        return []
    # A dataset of the user's: the tables that it holds. Names with an underscore may be caches, which fill with use.
    held = {name: part for name, part in vars(value).items() if not name.startswith("_") and _is_table(part)}
    return [held]


def _is_table(part: Any) -> bool:
    if isinstance(part, list | tuple):
        return bool(part) and isinstance(part[0], Tensor | np.ndarray | Mapping | str | tuple)
    return isinstance(part, Tensor | np.ndarray | Columns)


def _absorb_rows(digest: Any, table: Any) -> None:
    digest.update(f"{table.dtype}{tuple(table.shape)}".encode())
    if table.ndim and len(table):
        rows = _places(len(table))
        if isinstance(table, np.ndarray):
            if not table.dtype.hasobject:
                digest.update(np.ascontiguousarray(table[rows]).tobytes())
            return
        table = table.detach()[rows]
    if isinstance(table, Tensor) and table.layout is torch.strided:
        digest.update(table.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(table, np.ndarray):
        digest.update(table.tobytes())


def _places(length: int) -> list[int]:
    if length <= SAMPLED_ROWS:
        return list(range(length))
    return [number * (length - 1) // (SAMPLED_ROWS - 1) for number in range(SAMPLED_ROWS)]
