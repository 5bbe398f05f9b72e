"""One checkpoint as a folder that is whole or absent: filled aside, hashed, renamed once, verified in its place.

All checkpoints are written here, those of a run's store and those that keep another library's layout, with files of
that library beside ours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.errors import CheckpointError
from etude.runs import durable
from etude.runs.manifest import FILE_NAME, MANIFEST_NAME, STEP_NAME, Manifest, verify
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


def stage(tree: Mapping[Any, Any], warm: Mapping[str, StagedFile]) -> Staged:
    """Copy state, into the memory of an earlier save where it fits."""
    skeletons: dict[str, Any] = {}
    files: dict[str, StagedFile] = {}
    parts: dict[str, dict[str, str]] = {}
    views: list[Tensor] = []
    sources: list[Tensor] = []
    for key, value in tree.items():
        if not isinstance(key, str) or not _KEY.match(key):
            raise CheckpointError(f"the top-level key {key!r} cannot name a file; use letters, digits, - and _")
        skeletons[key], parted = split_files(key, value)
        for stem, (prefix, tensors) in parted.items():
            stem = free_stem(stem, files)
            staged = warm.get(stem)
            files[stem] = staged if staged and staged.fits(tensors) else StagedFile(tensors)
            views += files[stem].views
            sources += tensors.values()
            if prefix or stem != key:
                parts.setdefault(key, {})[stem] = prefix
    copy_all(views, sources)
    return Staged(skeletons, files, parts)


def free_stem(stem: str, taken: Mapping[str, Any]) -> str:
    """Return a name of a file that is not taken yet."""
    while stem in taken:
        stem += "_"
    return stem


def fill(folder: Path, staged: Staged, step: int, metric: float | None, info: Any) -> None:
    """Write state and the manifest into a folder, beside what is there, and make all of it durable."""
    found = sorted(folder.rglob("*"))
    records: dict[str, durable.FileRecord] = {}
    for path in found:
        if path.is_file():
            records[str(path.relative_to(folder))] = durable.sync_hashed(path)
    for key, file in staged.files.items():
        records[f"{key}.safetensors"] = durable.write_hashed(folder / f"{key}.safetensors", file.parts())
    state = json.dumps({"tree": staged.skeletons, "parts": staged.parts}, allow_nan=False).encode()
    records[STATE_NAME] = durable.write_hashed(folder / STATE_NAME, [state])
    others = {name: records.pop(name) for name in list(records) if not FILE_NAME.match(name)}
    durable.write_hashed(folder / MANIFEST_NAME, [Manifest(step, metric, info, records, others).dump()])
    for directory in [*(path for path in found if path.is_dir()), folder]:
        durable.fsync_directory(directory)


def publish(temp: Path, final: Path) -> None:
    """Rename a filled folder into place and verify it there; an older one of this name goes only after that."""
    older = [path for path in (final, *final.parent.glob(f"{final.name}-r*")) if os.path.lexists(path)]
    target, revision = final, 0
    while os.path.lexists(target):
        revision += 1
        target = final.with_name(f"{final.name}-r{revision}")
    os.rename(temp, target)
    durable.fsync_directory(final.parent)
    try:
        verify(target)
    except CheckpointError:
        durable.discard(target)
        raise
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
