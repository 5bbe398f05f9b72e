"""`checkpoint-N` folders that are whole or absent: filled aside, hashed, renamed once, verified before they are used.

A folder keeps the layout of transformers, so that its tools can read it: model files as `save_pretrained` writes them
and `trainer_state.json`. What transformers would pickle (optimizer, scheduler, scaler) is stored as `state.json` and
safetensors files instead, and `manifest.json` says what every file must hash to.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError
from etude.runs import durable
from etude.runs.checkpoint import Checkpoint, read_checkpoint
from etude.runs.durable import FileRecord
from etude.runs.manifest import MANIFEST_NAME, DamagedCheckpointError, Manifest
from etude.runs.tensor_file import StagedFile, copy_all
from etude.runs.tree import split_tensors

log = logging.getLogger("etude")

_FOLDER = re.compile(r"^checkpoint-(\d+)$")
# What a manifest may list: safetensors and JSON beside it. Anything else a model saves (a vocabulary, an adapter in a
# folder of its own) is hashed too, but listed apart, because Etude never reads it.
_LISTED = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json)$")


def entries(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the checkpoints in a directory, newest first."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = sorted(int(match[1]) for name in names if (match := _FOLDER.match(name)))
    return [(step, directory / f"checkpoint-{step}") for step in reversed(steps)]


def publish(temp: Path, final: Path, step: int, tree: Mapping[str, Any], metric: float | None) -> None:
    """Complete a filled folder with `tree` and the manifest, make it durable, and give it its name in one rename."""
    write_tree(temp, tree)
    listed, others = {}, {}
    for path in _files(temp):
        name = str(path.relative_to(temp))
        written = _sync(path)
        if _LISTED.match(name):
            listed[name] = written
        else:
            others[name] = written.to_json()
    manifest = Manifest(step, metric, {"others": others}, listed)
    durable.write_hashed(temp / MANIFEST_NAME, [manifest.dump()])
    for folder in {path.parent for path in _files(temp)} | {temp}:
        durable.fsync_directory(folder)
    if os.path.lexists(final):
        durable.discard(final)  # damaged, or of a history that this run has left
    os.rename(temp, final)
    durable.fsync_directory(final.parent)


def write_tree(directory: Path, tree: Mapping[str, Any]) -> None:
    """Write state as `state.json` and one safetensors file for each part that has tensors."""
    skeletons = {}
    for key, value in tree.items():
        skeletons[key], tensors = split_tensors(value)
        if tensors:
            write_tensors(directory / f"{key}.safetensors", tensors)
    durable.write_hashed(directory / "state.json", [json.dumps({"tree": skeletons}, allow_nan=False).encode()])


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a new safetensors file; tensors that share memory are each written in full."""
    staged = StagedFile(tensors)
    copy_all(staged.views, list(tensors.values()))
    durable.write_hashed(path, staged.parts())


def read(path: Path) -> Checkpoint:
    """Verify every file of a checkpoint and return its state."""
    found = read_checkpoint(path)
    named = _FOLDER.match(path.name)
    if named and int(named[1]) != found.step:
        raise DamagedCheckpointError(path, MANIFEST_NAME, f"belongs to step {found.step}, not to this one")
    for name, entry in found.info.get("others", {}).items():
        # Checkpoints of the first schema list the SHA-256 and the size.
        listed = FileRecord.from_json(entry) if isinstance(entry, Mapping) else FileRecord(entry[0], entry[1], "sha256")
        try:
            intact = durable.hash_file(path / name, listed.kind) == listed
        except OSError:
            intact = False
        if not intact:
            raise DamagedCheckpointError(path, name, "is missing or damaged")
    return found


def newest_good(directory: Path) -> Checkpoint:
    """Return the newest checkpoint that is whole, saying loudly what was wrong with newer ones."""
    damage = ""
    for step, path in entries(directory):
        try:
            found = read(path)
        except DamagedCheckpointError as error:
            damage = f"; the last problem: {error}"
            log.warning("%s; looking for an older checkpoint", error)
            continue
        if damage:
            log.warning("using %s (step %d) instead", path.name, step)
        return found
    raise CheckpointError(f"no checkpoint in {directory} can be loaded{damage}")


def set_aside(directory: Path, step: int) -> None:
    """Rename the checkpoints after `step`, so that a run which goes on from there cannot be taken for theirs."""
    for other, path in entries(directory):
        if other > step:
            revision, target = 0, path.with_name(f"old-{path.name}")
            while os.path.lexists(target):
                revision += 1
                target = path.with_name(f"old-{path.name}-{revision}")
            os.rename(path, target)
            log.warning("training goes on from step %d, before %s: renamed that to %s", step, path, target.name)


def prune(directory: Path, keep: Callable[[list[Path]], list[Path]]) -> None:
    """Remove the checkpoints that `keep`, given all of them, newest first, does not return."""
    found = [path for _, path in entries(directory)]
    kept = set(keep(found))
    for path in found:
        if path not in kept:
            durable.discard(path)


def newest_and(best: str | None, limit: int | None) -> Callable[[list[Path]], list[Path]]:
    """Return the rule of `save_total_limit`: so many of the newest, the best always among them, the newest always."""

    def keep(newest_first: list[Path]) -> list[Path]:
        if limit is None or limit <= 0:
            return newest_first
        chosen = newest_first[:limit]
        special = [path for path in newest_first if best is not None and path == Path(best)]
        if special and special[0] not in chosen:
            chosen = [*newest_first[: max(1, limit - 1)], *special]
        return chosen

    return keep


def _files(directory: Path) -> Iterator[Path]:
    yield from sorted(path for path in directory.rglob("*") if path.is_file())


def _sync(path: Path) -> FileRecord:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return durable.hash_file(path)
