"""One checkpoint as a folder that is whole or absent: filled aside, hashed, renamed once, verified in its place.

All checkpoints are written here, those of a run's store and those that keep another library's layout, with files of
that library beside ours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.errors import CheckpointError
from etude.runs import durable
from etude.runs.manifest import (
    FILE_NAME,
    MANIFEST_NAME,
    SHARDED_VERSION,
    STEP_NAME,
    WHOLE_VERSION,
    Manifest,
    verify,
)
from etude.runs.shards import Piece, describe, file_stem
from etude.runs.tensor_file import StagedFile, copy_all
from etude.runs.tree import split_files

STATE_NAME = "state.json"
_KEY = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")


@dataclass(frozen=True)
class Staged:
    """State in memory of its own: nothing in it changes when training goes on."""

    skeletons: dict[str, Any]
    files: dict[str, StagedFile]
    parts: dict[str, dict[str, str]]
    """By key the files that it is kept in, with what the names of their tensors begin with; others are one file."""
    shards: dict[str, Any] = field(default_factory=dict)
    """By file what of it is in the files of several ranks."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return sum(file.nbytes for file in self.files.values())


def stage(tree: Mapping[Any, Any], warm: Mapping[str, StagedFile], rank: int = 0, world: int = 1) -> Staged:
    """Copy state, into the memory of an earlier save where it fits; a rank copies its pieces, rank 0 also the rest."""
    staged, views, sources = lay_out(tree, warm, rank, world)
    copy_all(views, sources)
    return staged


def lay_out(
    tree: Mapping[Any, Any], warm: Mapping[str, StagedFile], rank: int = 0, world: int = 1
) -> tuple[Staged, list[Tensor], list[Tensor]]:
    """Return memory for the state of a rank, the places in it, and what is to be copied there."""
    staged = Staged({}, {}, {})
    views: list[Tensor] = []
    sources: list[Tensor] = []

    def add(stem: str, tensors: dict[str, Tensor]) -> None:
        held = warm.get(stem)
        staged.files[stem] = held if held and held.fits(tensors) else StagedFile(tensors)
        views.extend(staged.files[stem].views)
        sources.extend(tensors.values())

    taken: set[str] = set()
    for key, value in tree.items():
        if not isinstance(key, str) or not _KEY.match(key):
            raise CheckpointError(f"the top-level key {key!r} cannot name a file; use letters, digits, - and _")
        staged.skeletons[key], parted = split_files(key, value)
        for stem, (prefix, tensors) in parted.items():
            stem = free_stem(stem, taken)
            taken.add(stem)
            if prefix or stem != key:
                staged.parts.setdefault(key, {})[stem] = prefix
            pieces = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Piece)}
            rest = {name: tensor for name, tensor in tensors.items() if name not in pieces}
            if rest and rank == 0:
                add(stem, rest)
            if world == 1 and (cut := [name for name, piece in pieces.items() if piece.tensor.shape != piece.shape]):
                raise CheckpointError(f"the tensor {cut[0]!r} is sharded over ranks; all of them must save together")
            if pieces:
                staged.shards[stem] = describe(pieces, world)
                # One rank at least has a file with every tensor, though it be empty.
                own = {n: piece.tensor for n, piece in pieces.items() if rank == 0 or piece.tensor.numel()}
                if own:
                    add(file_stem(stem, rank, world), own)
    return staged, views, sources


def free_stem(stem: str, taken: Container[str]) -> str:
    """Return a name of a file that is not taken yet."""
    while stem in taken:
        stem += "_"
    return stem


def fill(folder: Path, staged: Staged, step: int, metric: float | None, info: Any) -> None:
    """Write state and the manifest into a folder, beside what is there, and make all of it durable."""
    records: dict[str, durable.FileRecord] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            records[str(path.relative_to(folder))] = durable.sync_hashed(path)
    seal(folder, staged, records | write_files(folder, staged), step, metric, info)


def write_files(folder: Path, staged: Staged) -> dict[str, durable.FileRecord]:
    """Write the tensors and return what their files must be."""
    return {
        f"{stem}.safetensors": durable.write_hashed(folder / f"{stem}.safetensors", file.parts())
        for stem, file in staged.files.items()
    }


def seal(
    folder: Path, staged: Staged, records: Mapping[str, durable.FileRecord], step: int, metric: float | None, info: Any
) -> None:
    """Write what is no tensor, and the manifest of all files; then every name is durable too."""
    body: dict[str, Any] = {"tree": staged.skeletons, "parts": staged.parts}
    if staged.shards:
        body["shards"] = staged.shards
    state = durable.write_hashed(folder / STATE_NAME, [json.dumps(body, allow_nan=False).encode()])
    files = {name: record for name, record in records.items() if FILE_NAME.match(name)} | {STATE_NAME: state}
    others = {name: record for name, record in records.items() if name not in files}
    version = SHARDED_VERSION if staged.shards else WHOLE_VERSION
    durable.write_hashed(folder / MANIFEST_NAME, [Manifest(step, metric, info, files, others, version).dump()])
    for directory in [*(path for path in sorted(folder.rglob("*")) if path.is_dir()), folder]:
        durable.fsync_directory(directory)


def publish(temp: Path, final: Path) -> None:
    """Rename a filled folder into place and verify it there; an older one of this name goes only after that."""
    target, older = move(temp, final)
    try:
        verify(target)
    except CheckpointError:
        durable.discard(target)
        raise
    settle(target, final, older)


def move(temp: Path, final: Path) -> tuple[Path, list[Path]]:
    """Rename a filled folder; return where it is now, beside older ones of its name until it is verified."""
    older = [path for path in (final, *final.parent.glob(f"{final.name}-r*")) if os.path.lexists(path)]
    target, revision = final, 0
    while os.path.lexists(target):
        revision += 1
        target = final.with_name(f"{final.name}-r{revision}")
    os.rename(temp, target)
    durable.fsync_directory(final.parent)
    return target, older


def settle(target: Path, final: Path, older: list[Path]) -> None:
    """Let a verified folder take the place of older ones."""
    for path in older:
        durable.discard(path)
    if target != final:
        os.rename(target, final)
        durable.fsync_directory(final.parent)


def entries(directory: Path, prefix: str = "step-") -> list[tuple[int, Path]]:
    """Return (step, path) of the checkpoints in a directory, newest first."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [(match, name) for name in names if (match := STEP_NAME.match(name)) and match[1] == prefix]
    found = sorted((int(match[2]), int(match[3] or 0), name) for match, name in matches)
    return [(step, directory / name) for step, _, name in reversed(found)]
