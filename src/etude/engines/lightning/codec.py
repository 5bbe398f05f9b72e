"""Lightning's checkpoints as trees of tensors and plain values: a few harmless types more, and never a pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from torch import Tensor

_MARK = "$value"
_PLAIN = (bool, int, float, str, type(None), Tensor)


def encode(value: Any, drop: Callable[[str, Any], bool] = lambda path, value: False, path: str = "") -> Any:
    """Return a value with its exotic parts spelled out, less what cannot be saved and `drop` says may be left out."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Container):
        return {_MARK: "omegaconf", "of": encode(OmegaConf.to_container(value), drop, path)}
    if isinstance(value, Mapping):
        inner = {key: encode(item, drop, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item is not _DROPPED}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [encode(item, drop, f"{path}.{number}") for number, item in enumerate(value)]
        items = [item for item in items if item is not _DROPPED]
        return items if isinstance(value, list) else tuple(items)
    spelled = _spell(value)
    if spelled is not None:
        return spelled
    return _DROPPED if drop(path, value) else value  # the tree refuses it, naming the place


_DROPPED = object()


def _spell(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Path):
        return {_MARK: "path", "of": str(value)}
    if isinstance(value, timedelta):
        return {_MARK: "timedelta", "of": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, set | frozenset):
        return {_MARK: type(value).__name__, "of": [encode(item) for item in value]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_MARK: "array", "of": torch.from_numpy(np.array(value))}
    if isinstance(value, np.generic):
        return {_MARK: "array0", "of": torch.from_numpy(np.array(value))}
    if isinstance(value, torch.Size):
        return {_MARK: "size", "of": list(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {_MARK: type(value).__name__, "of": str(value)}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else None}
    return None


_READ: dict[str, Callable[[Any], Any]] = {
    "omegaconf": OmegaConf.create,
    "path": Path,
    "timedelta": lambda parts: timedelta(*parts),
    "set": set,
    "frozenset": frozenset,
    "array": lambda tensor: tensor.numpy(),
    "array0": lambda tensor: tensor.numpy()[()],
    "size": torch.Size,
    "dtype": lambda name: getattr(torch, name.removeprefix("torch.")),
    "device": torch.device,
    "bytes": lambda tensor: b"" if tensor is None else tensor.numpy().tobytes(),
}


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, dict):
        if _MARK in value:
            return _READ[value[_MARK]](decode(value["of"]))
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return tuple(decode(item) for item in value) if isinstance(value, tuple) else value
