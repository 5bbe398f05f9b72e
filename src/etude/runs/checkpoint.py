"""Checkpoints that are whole or absent: staged by one memory copy, written aside, verified, then renamed once.

A store directory holds `step-00000010/` directories (safetensors and JSON only) and the links `last` and `best`.
The links are for people; loading looks at the directories and their manifests, so a crash between the rename and
the link loses nothing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from etude.errors import CheckpointError
from etude.runs import durable
from etude.runs.fallback import first_good, put_aside
from etude.runs.folder import STATE_NAME, Staged, entries, fill, lay_out, publish, stage
from etude.runs.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DamagedCheckpointError,
    Manifest,
    open_listed,
    read_manifest,
    verify,
    verify_files,
)
from etude.runs.shards import join, stored_tensors, whole
from etude.runs.tensor_file import StagedFile, read_tensors
from etude.runs.together import Peers, write_together
from etude.runs.tree import join_tensors, split_tensors

__all__ = [
    "MIGRATIONS",
    "SCHEMA_VERSION",
    "Checkpoint",
    "CheckpointStore",
    "acting_weights",
    "open_checkpoint",
    "read_checkpoint",
]

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: lambda tree: tree, 2: lambda tree: tree}
"""By the schema version they start from: functions that bring a loaded tree one version up."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, every byte of it verified."""

    step: int
    tree: dict[str, Any]
    path: Path
    metric: float | None
    info: dict[str, Any]


class CheckpointStore:
    """Saves and loads the checkpoints of one run; one process writes, or all `peers` together, any number may read."""

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int | None = 2,
        keep_best: int = 1,
        best_mode: Literal["min", "max"] = "min",
        on_warning: Callable[[str], None] | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Open a store; `on_warning` may be called from the writing thread; with `keep_last` None all are kept.

        With `peers`, every one of them saves: its own pieces of sharded tensors, and rank 0 the rest.
        """
        if (keep_last is not None and keep_last < 1) or keep_best < 0:
            raise ValueError(f"keep_last must be at least 1 and keep_best at least 0, got {keep_last} and {keep_best}")
        self.directory = Path(directory)
        self._keep_last, self._keep_best, self._best_mode = keep_last, keep_best, best_mode
        self._warn = on_warning or logging.getLogger(__name__).warning
        self._peers = peers
        self._place = (0, 1) if peers is None else (peers.rank, peers.world)
        self._staged: dict[str, StagedFile] = {}
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[Any] | None = None
        self._error: CheckpointError | None = None
        self.blocked_s = 0.0
        """Seconds that the last `save` took before it returned, waiting for the one before included."""
        self.waited_s = 0.0
        """Seconds, over all saves, spent waiting for the one before."""
        durable.remove_leftovers(self.directory)

    def save(
        self,
        tree: Mapping[str, Any],
        *,
        step: int,
        metric: float | None = None,
        info: Mapping[str, Any] | None = None,
        name: str | None = None,
        wait: bool = False,
    ) -> Path:
        """Copy the state and return; write, verify and prune in the background. Return where it will be.

        A failure to write is a warning, and an error only for those who wait. State that cannot be saved at all
        raises at once. A `name` is a link to the checkpoint, beside the directory of all of them.
        """
        started_s = time.perf_counter()
        self._wait_for_writer()
        self.waited_s += time.perf_counter() - started_s
        self._error = None
        staged, facts = self._stage(tree, step, info or {})
        metric = None if metric is None else float(metric)
        self._pending = self._background().submit(self._write, staged, step, metric, facts, name)
        self.blocked_s = time.perf_counter() - started_s
        if wait:
            self.wait()
        return self._path(step)

    def reserve(self, tree: Mapping[str, Any]) -> None:
        """Make memory ready, in the background, so that the first save of such a tree is as quick as the others.

        The first touch of new memory costs several copies.
        """
        self._wait_for_writer()
        self._staged = lay_out(tree, {}, *self._place)[0].files
        self._pending = self._background().submit(_touch_all, list(self._staged.values()))

    def wait(self) -> None:
        """Wait until the last save is on disk and verified; raise CheckpointError if it failed."""
        self._wait_for_writer()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def load(self, which: str | Path | int = "last") -> Checkpoint:
        """Load "last", "best", a step or a path, every hash verified.

        A damaged "last" or "best" is a warning and the next one is taken; a damaged step or path is an error.
        """
        self._wait_for_writer()
        if which == "last":
            return self._load_first([path for _, path in entries(self.directory)], "no checkpoint")
        if which == "best":
            return self._load_first(self._by_metric(self._warn), "no checkpoint with a metric")
        if isinstance(which, int):
            paths = [path for step, path in entries(self.directory) if step == which]
            if not paths:
                have = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(f"no checkpoint of step {which} in {self.directory}; steps: {have}")
            return read_checkpoint(paths[0])
        path = Path(which)
        for inner in (path, path / "checkpoints"):
            if not (inner / MANIFEST_NAME).exists() and entries(inner):
                return CheckpointStore(inner, best_mode=self._best_mode, on_warning=self._warn).load("last")
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint at {path}")
        return read_checkpoint(path)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        return sorted({step for step, _ in entries(self.directory)})

    @property
    def last(self) -> Path | None:
        """The newest checkpoint."""
        return next((path for _, path in entries(self.directory)), None)

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best metric; the earlier of two equal ones."""
        return next(iter(self._by_metric()), None)

    # Staging: the only part that training waits for.

    def _stage(self, tree: Mapping[str, Any], step: int, info: Mapping[str, Any]) -> tuple[Staged, Any]:
        if type(step) is not int or step < 0:
            raise ValueError(f"a step is a whole number from 0, got {step!r}")
        facts, stray = split_tensors(dict(info))
        if stray:
            raise CheckpointError(f"info holds the tensor {next(iter(stray))!r}; tensors belong into the tree")
        staged = stage(tree, self._staged, *self._place)
        self._staged = staged.files
        return staged, facts

    def _wait_for_writer(self) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result()
        finally:
            # An interrupt may cut the wait short; the staged memory is then still being written from.
            if pending.done():
                self._pending = None

    def _background(self) -> ThreadPoolExecutor:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="etude-checkpoint")
        return self._writer

    # Everything below `_write` runs in the background.

    def _write(self, staged: Staged, step: int, metric: float | None, facts: Any, name: str | None) -> None:
        try:
            if self._peers is not None:
                write_together(self._peers, staged, self._path(step), step, metric, facts)
            else:
                self._write_alone(staged, step, metric, facts)
        except (OSError, CheckpointError) as error:
            good = self.last
            self._error = CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: {_describe(error)}; "
                + (f"the last good one is {good.name}" if good else "there is no other one yet")
            )
            self._warn(str(self._error))
            return
        if self._place[0] != 0:
            return
        try:
            self._link()
            if name is not None:
                durable.swap_symlink(self.directory.parent / name, f"{self.directory.name}/{self._path(step).name}")
            self._prune(step)
        except OSError as error:
            self._warn(f"old checkpoints in {self.directory} could not be tidied: {_describe(error)}")

    def _write_alone(self, staged: Staged, step: int, metric: float | None, facts: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        durable.remove_leftovers(self.directory)
        with durable.in_use(self.directory / durable.temp_name(f"{step:08d}")) as temp:
            temp.mkdir()
            fill(temp, staged, step, metric, facts)
            publish(temp, self._path(step))

    def _link(self) -> None:
        for name, path in (("last", self.last), ("best", self.best)):
            if path is not None:
                durable.swap_symlink(self.directory / name, path.name)

    def _prune(self, step: int) -> None:
        """Remove what is neither new nor good enough; called only once the checkpoint of `step` has been verified.

        The future of another history (a damaged or an older checkpoint was resumed) is somebody's result, as far as it
        is good, and stays under a name that nothing loads by itself.
        """
        keep = set(self._by_metric()[: self._keep_best])
        newest = 0
        for other, path in entries(self.directory):
            try:
                (verify if other > step else read_manifest)(path)
                is_ours = True
            except DamagedCheckpointError as error:
                self._warn(f"removed a checkpoint that cannot be loaded: {error}")
                durable.discard(path)
                continue
            except CheckpointError:
                is_ours = False  # Written by a newer Etude: not ours to judge.
            if other > step:
                self._warn(
                    f"the run went back before {path} and has now saved step {step}: the other is kept as "
                    f"{put_aside(path).name}"
                )
            elif is_ours:
                newest += 1
                if self._keep_last is not None and newest > self._keep_last and path not in keep:
                    durable.discard(path)
        self._link()
        for link in self.directory.parent.iterdir():
            if link.is_symlink() and not link.exists() and os.readlink(link).startswith(f"{self.directory.name}/step-"):
                link.unlink()  # its checkpoint has gone

    # Looking around.

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _by_metric(self, warn: Callable[[str], None] | None = None) -> list[Path]:
        sign = 1.0 if self._best_mode == "min" else -1.0
        ranked = []
        for step, path in entries(self.directory):
            try:
                metric = read_manifest(path).metric
            except CheckpointError as error:
                if warn:
                    warn(f"{error}; its metric is unknown, so it is passed over")
                continue
            if metric is not None and metric == metric:  # NaN is never best.
                ranked.append((sign * metric, step, path))
        return [path for _, _, path in sorted(ranked)]

    def _load_first(self, paths: Iterable[Path], what: str) -> Checkpoint:
        return first_good(paths, read_checkpoint, self.directory, what=what, say=self._warn)


def acting_weights(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights that a policy acts with: averaged ones, where training kept any, over those it trained."""
    return {**tree.get("policy", {}), **tree.get("shown", {}), **tree.get("ema", {})}


def read_checkpoint(directory: Path) -> Checkpoint:
    """Verify and load one checkpoint directory; only the .safetensors and .json files its manifest lists are read."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    contents: dict[str, Any] = {}
    with _complaints(directory) as at:
        for name, listed in manifest.files.items():
            at.append(name)
            with open_listed(directory, name, listed) as (file, digest):
                contents[name] = read_tensors(file, digest) if name.endswith(".safetensors") else file.readall()
                if isinstance(contents[name], bytes):
                    digest.update(contents[name])
        verify_files(directory, manifest.others)
        found = _assemble(directory, manifest, contents, at)
    return replace(found, tree=_migrate(found.tree, manifest, directory))


def open_checkpoint(directory: Path, on_disk: Container[str]) -> Checkpoint:
    """Load a checkpoint whose files have been verified; tensors of the keys `on_disk` stay there until needed."""
    manifest = read_manifest(directory)
    contents: dict[str, Any] = {}
    with _complaints(directory) as at:
        for name in manifest.files:
            at.append(name)
            path = directory / name
            contents[name] = stored_tensors(path) if name.endswith(".safetensors") else path.read_bytes()
        found = _assemble(directory, manifest, contents, at)
        tree = {key: value if key in on_disk else whole(value) for key, value in found.tree.items()}
    return replace(found, tree=_migrate(tree, manifest, directory))


@contextmanager
def _complaints(directory: Path) -> Iterator[list[str]]:
    """Turn whatever is wrong with a file into a complaint about damage; the last name in the list is that file's."""
    at = [MANIFEST_NAME]
    try:
        yield at
    except DamagedCheckpointError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError, CheckpointError) as error:
        raise DamagedCheckpointError(directory, at[-1], f"cannot be read: {error}") from None


def _assemble(directory: Path, manifest: Manifest, contents: dict[str, Any], at: list[str]) -> Checkpoint:
    at.append(STATE_NAME)
    if STATE_NAME not in contents:
        raise ValueError("is not listed in the manifest")
    state = json.loads(contents[STATE_NAME])
    tree = {}
    for key, skeleton in state["tree"].items():
        tensors: dict[str, Any] = {}
        for stem, prefix in {key: "", **state.get("parts", {}).get(key, {})}.items():
            at.append(f"{stem}.safetensors")
            held = {**contents.get(at[-1], {}), **join(stem, state.get("shards", {}).get(stem), contents)}
            tensors |= {f"{prefix}{inner}": tensor for inner, tensor in held.items()}
        tree[key] = join_tensors(skeleton, tensors)
    at.append(MANIFEST_NAME)
    return Checkpoint(manifest.step, tree, directory, manifest.metric, join_tensors(manifest.info, {}))


def _touch_all(files: list[StagedFile]) -> None:
    for staged in files:
        staged.touch()


def _migrate(tree: dict[str, Any], manifest: Manifest, directory: Path) -> dict[str, Any]:
    for version in range(manifest.schema_version, SCHEMA_VERSION):
        if version not in MIGRATIONS:
            raise CheckpointError(
                f"checkpoint {directory} has schema version {manifest.schema_version}, and this Etude has no way from "
                f"version {version} to {version + 1}; load it with the version that wrote it"
            )
        tree = MIGRATIONS[version](tree)
    return tree


def _describe(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
