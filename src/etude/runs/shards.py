"""Tensors of which every rank holds some rows: each rank's rows are a file of its own, and a reader puts them together.

The rows of `policy` are in `policy-00002-of-00008.safetensors` and its like, in the order of the ranks; a rank without
rows of any tensor has no file. `state.json` has the whole shape of each, so that a file too few or too many is found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.runs.tensor_file import read_span, spans_of


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of a tensor that is cut along one dimension, in the order of the ranks."""

    tensor: Tensor
    shape: torch.Size
    """Of the whole."""
    dim: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a checkpoint that is still on disk: whoever needs some rows of it reads no others."""

    shape: torch.Size
    dtype: torch.dtype
    dim: int
    parts: tuple[tuple[Path, int, list[int]], ...]
    """File, first byte and shape of each part, in order along the dimension."""

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return what lies between two places along the dimension, in memory of its own."""
        if not self.shape or self.dim:
            everything = [read_span(path, at, self.dtype, shape) for path, at, shape in self.parts]
            found: Tensor = _joined(everything, self.dim)
            return found if stop is None else found.narrow(self.dim, start, stop - start).contiguous()
        stop = self.shape[0] if stop is None else stop
        found = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        first = 0
        for path, at, shape in self.parts:
            low, high = max(first, start), min(first + shape[0], stop)
            if low < high:
                rows = found[low - start : high - start]
                read_span(path, at + (low - first) * row_bytes, self.dtype, list(rows.shape), rows)
            first += shape[0]
        return found


def whole(tree: Any) -> Any:
    """Return state with everything in it that is still on disk read."""
    if isinstance(tree, Stored):
        return tree.read()
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    return type(tree)(map(whole, tree)) if type(tree) in (list, tuple) else tree


def file_stem(stem: str, rank: int, world: int) -> str:
    """Return the name of the file with a rank's rows, without its ending."""
    return f"{stem}-{rank:05d}-of-{world:05d}"


def describe(pieces: Mapping[str, Piece], world: int) -> dict[str, Any]:
    """Return what a reader must know about tensors that are in the files of several ranks."""
    return {"world": world, "tensors": {name: [piece.dim, list(piece.shape)] for name, piece in pieces.items()}}


def join(stem: str, listed: Mapping[str, Any] | None, contents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return by name the tensors (or what is stored of them) whose rows are in files of several ranks.

    Raises ValueError if a part is missing: the shapes must come out.
    """
    found: dict[str, Any] = {}
    if listed is None:
        return found
    for name, (dim, shape) in listed["tensors"].items():
        names = (f"{file_stem(stem, rank, listed['world'])}.safetensors" for rank in range(listed["world"]))
        parts = [contents[file][name] for file in names if name in contents.get(file, {})]
        if sum(part.shape[dim] for part in parts) != shape[dim] or not parts:
            raise ValueError(f"has too few or too many rows of {name!r}: {len(parts)} of {listed['world']} parts")
        found[name] = _joined(parts, dim)
        if list(found[name].shape) != shape:
            raise ValueError(f"has {name!r} as {list(found[name].shape)} instead of {shape}")
    return found


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file as they lie there, reading no more than its header."""
    return {
        name: Stored(torch.Size(shape), dtype, 0, ((path, at, shape),)) for name, dtype, shape, at in spans_of(path)
    }


def _joined(parts: list[Any], dim: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return Stored(torch.Size(shape), parts[0].dtype, dim, tuple(inner for part in parts for inner in part.parts))
