"""Nested state as JSON plus flat tensors, and back: what comes back compares equal to what was given.

JSON alone loses tuples, non-text keys, NaN and infinity, so these become objects whose only key starts with `$`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.errors import CheckpointError
from etude.runs.shards import Piece

_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"
_RESERVED_NAME = "__metadata__"  # The safetensors header keeps this one for itself.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_PLAIN = frozenset({int, str, bool, type(None)})
_TENSORS = frozenset({Tensor, torch.nn.Parameter})


class Parted(dict[str, Any]):
    """A mapping whose tensors are kept in a file for each first part of their names: of `encoder.weight`, `encoder`.

    Args:
        values: The mapping.
        suffix: Ends the name of each file.
    """

    def __init__(self, values: Mapping[str, Any], suffix: str = "") -> None:
        super().__init__(values)
        self.suffix = suffix


def split_files(key: str, value: Any) -> tuple[Any, dict[str, tuple[str, dict[str, Any]]]]:
    """Return a JSON skeleton, and by the name of each file what its tensors' names began with and the tensors."""
    skeleton, tensors = split_tensors(value)
    if not isinstance(value, Parted):
        return skeleton, {key: ("", tensors)} if tensors else {}
    files: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, tensor in tensors.items():
        part, dot, rest = name.partition(".")
        own = dot and _FILE_NAME.fullmatch(part)
        stem, prefix, rest = (part + value.suffix, f"{part}.", rest) if own else (key, "", name)
        files.setdefault(stem, (prefix, {}))[1][rest] = tensor
    return skeleton, files


def split_tensors(tree: Any) -> tuple[Any, dict[str, Any]]:
    """Return a JSON skeleton of `tree` and its tensors, or pieces of them, by name (their path in the tree, unique)."""
    tensors: dict[str, Any] = {}
    try:
        return _split(tree, "", tensors), tensors
    except RecursionError:
        raise CheckpointError("the state is nested too deeply to be saved; does it contain itself?") from None


def join_tensors(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that `split_tensors` took apart."""
    if isinstance(skeleton, list):
        return [join_tensors(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) != 1 or not next(iter(skeleton)).startswith("$"):
        return {key: join_tensors(item, tensors) for key, item in skeleton.items()}
    ((marker, content),) = skeleton.items()
    try:
        if marker == _TENSOR:
            return tensors[content]
        if marker == _TUPLE:
            return tuple(join_tensors(item, tensors) for item in content)
        if marker == _DICT:
            return {join_tensors(key, tensors): join_tensors(item, tensors) for key, item in content}
        if marker == _FLOAT:
            return float(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read {marker} {content!r} in the saved state ({error!r})") from None
    raise CheckpointError(f"the saved state holds the unknown marker {marker!r}; a newer Etude may have written it")


def _split(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor | Piece):
        return {_TENSOR: _add(value, path, tensors)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, Mapping):
        return _split_mapping(value, path, tensors)
    if isinstance(value, list | tuple):
        prefix = f"{path}." if path else ""
        items = [
            item if type(item) in _PLAIN else _split(item, f"{prefix}{index}", tensors)
            for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, int):  # IntEnum and the like
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return _split(value.item(), path, tensors)
    hint = "; make it a tensor with torch.from_numpy" if isinstance(value, np.ndarray) else ""
    raise CheckpointError(
        f"the state at {path or 'the top'!r} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, "
        f"numbers, text, None, lists, tuples and dictionaries of these{hint}"
    )


def _split_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Any]) -> Any:
    prefix = f"{path}." if path else ""
    if any(type(key) is not str or key[:1] == "$" for key in value):
        return {_DICT: [_split_pair(key, item, prefix, tensors) for key, item in value.items()]}
    skeleton = {}
    for key, item in value.items():
        # The common leaves are settled here without another call: this loop is on the critical path of a save.
        kind = type(item)
        if kind in _TENSORS:
            name = prefix + key
            if name in tensors or name == _RESERVED_NAME:
                name = _add(item, name, tensors)
            else:
                tensors[name] = item
            skeleton[key] = {_TENSOR: name}
        elif kind in _PLAIN:
            skeleton[key] = item
        else:
            skeleton[key] = _split(item, prefix + key, tensors)
    return skeleton


def _split_pair(key: Any, item: Any, prefix: str, tensors: dict[str, Any]) -> list[Any]:
    if isinstance(key, Tensor):
        raise CheckpointError(f"the state at {prefix or 'the top'!r} has a tensor as a key; use its name instead")
    return [
        key if type(key) in _PLAIN else _split(key, f"{prefix}key", tensors),
        _split(item, f"{prefix}{key}", tensors),
    ]


def _add(tensor: Tensor | Piece, path: str, tensors: dict[str, Any]) -> str:
    if type(tensor) not in _TENSORS and hasattr(tensor, "full_tensor"):
        raise CheckpointError(f"the tensor at {path!r} is sharded over ranks; gather it with full_tensor() first")
    name, count = path or "tensor", 1
    while name in tensors or name == _RESERVED_NAME:
        count += 1
        name = f"{path}~{count}"
    tensors[name] = tensor
    return name
