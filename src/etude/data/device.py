"""Move whole batches between devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Return a batch with its tensors on `device`; what is there already is not copied.

    Goes into dictionaries, lists, tuples and named tuples, and calls `.to(device)` of other objects that have it.
    """
    return _move(batch, torch.device(device))


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        moved = {key: _move(item, device) for key, item in value.items()}
        if all(moved[key] is item for key, item in value.items()):
            return value
        return moved if type(value) is dict else _like(value, moved)
    if isinstance(value, list | tuple):
        items = [_move(item, device) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    return value.to(device) if callable(getattr(value, "to", None)) else value


def _like(value: Any, moved: dict[Any, Any]) -> Any:
    # Hugging Face's BatchEncoding and the like know how to move themselves; others are rebuilt, or become a dict.
    if callable(getattr(value, "update", None)) and callable(getattr(value, "copy", None)):
        copied = value.copy()
        copied.update(moved)
        return copied
    return moved
