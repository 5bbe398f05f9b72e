"""Checkpoints under names that another library gives them (`epoch=0-step=10.ckpt`): which one is meant by a path."""

from __future__ import annotations

from pathlib import Path

from etude.errors import CheckpointError
from etude.runs.checkpoint import Checkpoint, read_checkpoint
from etude.runs.fallback import first_good
from etude.runs.manifest import MANIFEST_NAME, read_manifest


def is_named(path: Path) -> bool:
    """Tell whether a path is such a checkpoint, or holds some."""
    inside = ("*.ckpt", "checkpoints/*.ckpt", "version_*")
    return path.suffix == ".ckpt" or any(True for pattern in inside for _ in path.glob(pattern))


def load_named(path: Path) -> Checkpoint:
    """Load a checkpoint, every byte verified, or the newest good one in a directory or in its `checkpoints`.

    In place of a damaged one the newest good one that is not newer is taken, with a warning.
    """
    if not path.exists():
        aside = aside_of(path)
        if not aside.exists():
            raise CheckpointError(f"there is no checkpoint at {path}")
        path = aside
    if (path / MANIFEST_NAME).exists():
        return first_good([path, *_not_newer(path)], read_checkpoint, path.parent)
    if inside := _newest_first(path) or _newest_first(path / "checkpoints"):
        return first_good(inside, read_checkpoint, path)
    if versions := sorted(path.glob("version_*"), key=lambda path: path.stat().st_mtime):
        raise CheckpointError(f"{path} holds several runs; name one of them, such as {versions[-1]}")
    return first_good([path, *_not_newer(path)], read_checkpoint, path.parent)


def aside_of(path: Path) -> Path:
    """Return where a crash may have left the new one of two checkpoints of one name."""
    return path.with_name(f".{path.name}.new")


def _newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, newest first; damaged ones that still have a manifest included."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith(".tmp-") or path.is_symlink() or not (path / MANIFEST_NAME).exists():
            continue
        found.append((_step(path), path.stat().st_mtime_ns, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _not_newer(path: Path) -> list[Path]:
    """Return the checkpoints beside one that are not newer, newest first; all of them if it does not say its step."""
    step = _step(path)
    beside = [other for other in _newest_first(path.parent) if other.resolve() != path.resolve()]
    return beside if step < 0 else [other for other in beside if _step(other) <= step]


def _step(path: Path) -> int:
    try:
        return read_manifest(path).step
    except CheckpointError:
        return -1
