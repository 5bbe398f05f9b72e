"""The run directory as a session sees it: rank 0 writes, every rank reads the same checkpoint."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from etude.errors import CheckpointError, Interrupted
from etude.loop.distributed import Group
from etude.loop.shared_reading import read_together
from etude.rollouts.transcripts import Transcripts, holds_text
from etude.runs.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from etude.runs.directory import Run, plain_config, resolve_run
from etude.runs.durable import write_atomically
from etude.runs.fallback import first_good
from etude.runs.folder import entries
from etude.runs.lock import DirectoryLock
from etude.runs.loggers import LoggerGroup
from etude.runs.metrics import MetricsLog, StepLog, read_rows
from etude.runs.tree import split_tensors
from etude.secrets import redact_tree
from etude.types import Rollouts
from etude.types.duration import Progress

if TYPE_CHECKING:
    from etude.loop.session import Session
    from etude.trainer import Trainer

log = logging.getLogger("etude")

LARGE_BYTES = 500_000_000
"""The size of a checkpoint from which it is worth a line."""


@contextmanager
def refused_writes(directory: Path) -> Iterator[None]:
    """Say in one sentence that a directory cannot be written: no room, no right, a broken disk, a size limit."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(unwritable(error, directory)) from error


def unwritable(error: OSError, directory: Path | str) -> str:
    """Return the sentence for a write that the system refused."""
    return f"{error.filename or directory}: cannot be written ({error.strerror or error})"


class Record:
    """Writes what a run leaves behind; with `run=False`, nothing at all."""

    def __init__(self, trainer: Trainer, group: Group, resume: str | Path, sharded: bool = False) -> None:
        self.trainer, self.group, self.resume = trainer, group, resume
        self.sharded = sharded
        """Whether every rank saves its own part."""
        self.directory: Path | None = None
        self.store: CheckpointStore | None = None
        self.metrics: MetricsLog | None = None
        self.transcripts: Transcripts | None = None
        self._written: StepLog | None = None
        self._lock: DirectoryLock | None = None
        self.loggers = LoggerGroup([])
        self.changes: list[str] = []
        """What differs from the session that this one goes on from, in words."""
        self._said_size = False

    def __enter__(self) -> Record:
        trainer, config = self.trainer, self.trainer.config
        request = trainer.run_request
        if request is False:
            return self
        self.directory = self._lock_directory(request)
        trainer.run = Run(self.directory)
        self.store = trainer.run.checkpoints(
            keep_last=config.keep_last, keep_best=config.keep_best, best_mode=config.best_mode, on_warning=self._warn,
            peers=self.group.aside() if self.sharded else None,
        )  # fmt: skip
        return self

    def _lock_directory(self, request: Any) -> Path:
        """Choose the directory and lock it, on rank 0; every rank learns which it is, or why it cannot be had."""
        trainer = self.trainer

        def lock() -> str:
            directory = Path(trainer.run_root)
            try:
                directory = resolve_run(request, root=trainer.run_root, name=trainer.name, resume=self.resume).dir
                self._lock = DirectoryLock(directory, self._warn)
                self._lock.acquire()
            except OSError as error:
                raise CheckpointError(unwritable(error, directory)) from error
            return str(directory)

        return Path(self.group.ask_main(lock))

    def __exit__(self, *_: object) -> None:
        self.loggers.close()
        for rows in (self.metrics, self._written):
            if rows is not None:
                rows.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def _writes(self) -> bool:
        return self.group.is_main or self.sharded

    def _warn(self, message: str) -> None:
        if self.group.is_main:
            log.warning("%s", message)

    def find_checkpoint(self, resume: str | Path) -> dict[str, Any] | None:
        """Return the state to go on from, verified: the newest good one, the one named, or None to start afresh."""
        if str(resume) == "never" or (self.store is None and str(resume) == "auto"):
            return None
        found: list[str] = self.group.ask_main(lambda: self._candidates(resume))
        if not found:
            return None
        checkpoint = self._read_first([Path(path) for path in found], exact=found == [str(Path(resume))])
        if self.group.is_main:
            self._tell(f"resuming from {checkpoint.path} at step {checkpoint.step}")
        return checkpoint.tree

    def _candidates(self, resume: str | Path) -> list[str]:
        """Return where the checkpoint may be, the one to prefer first; none if there is nothing to go on from."""
        path = Path(resume)
        if str(resume) == "auto":
            assert self.store is not None
            return [str(found) for _, found in entries(self.store.directory)]
        if not (path / "checkpoints").is_dir():
            if not path.exists():
                raise CheckpointError(
                    f"no checkpoint at {path}; resume takes 'auto', 'never', a checkpoint or a run directory"
                )
            return [str(path)]
        inside = [str(found) for _, found in entries(path / "checkpoints")]
        if not inside:
            raise CheckpointError(f"no checkpoint in {path / 'checkpoints'} can be loaded")
        return inside

    def _read_first(self, paths: list[Path], *, exact: bool) -> Checkpoint:
        """Return the first that is whole: read by rank 0 and then by the others, or verified by all together.

        One that was asked for by name is read, or its damage is an error.
        """
        loaded: list[Checkpoint] = []

        def first(read: Callable[[Path], Checkpoint]) -> Checkpoint:
            return read(paths[0]) if exact else first_good(paths, read, paths[0].parent, say=self._warn)

        def look() -> str:
            loaded.append(first(read_checkpoint))
            return str(loaded[0].path)

        if self.sharded:
            return first(partial(read_together, self.group))

        path = self.group.ask_main(look)
        return loaded[0] if loaded else read_checkpoint(Path(path))

    def start(
        self, progress: Progress, parameters: tuple[int, int], changed: Sequence[str] = (), *, idle: bool = False
    ) -> None:
        """Open the metrics, cut back to where we go on from, and the loggers.

        Args:
            progress: Where the run goes on from.
            parameters: How many parameters are trained, and how many there are.
            changed: What differs from the session before, in words.
            idle: The run had finished before; nothing will be trained, so what it was trained with stays on record.
        """
        if self.directory is None or not self.group.is_main:
            return
        with refused_writes(self.directory):
            self._start(Run(self.directory), progress, parameters, changed, idle)

    def _start(
        self, run: Run, progress: Progress, parameters: tuple[int, int], changed: Sequence[str], idle: bool
    ) -> None:
        config = self.trainer.describe()
        before = run.read_config() if idle else run.write_config(config)
        if progress.step and before:
            self.changes += _differences(before, plain_config(config))
        self.changes += changed
        if not idle:
            for change in self.changes:
                self._tell(f"changed since the last session: {change}")
            run.write_environment()
        run.set_status("running", step=progress.step, trainable_parameters=parameters[0], parameters=parameters[1])
        self.metrics = run.metrics()
        self.metrics.truncate_after(progress.step)
        if run.transcripts_path.exists():
            self._written = StepLog(run.transcripts_path)
            self._written.truncate_after(progress.step)
        self.loggers = LoggerGroup(self.trainer.loggers)
        self.loggers.start(run.dir, config, progress.step)

    def write_statistics(self, norm_stats: Mapping[str, Any]) -> None:
        """Write the statistics that batches are normalised by, for whoever uses the weights elsewhere."""
        if self.directory is not None and self.group.is_main:
            text = json.dumps(norm_stats, indent=2, allow_nan=False) + "\n"
            with refused_writes(self.directory):
                write_atomically(self.directory / "dataset_stats.json", text.encode())

    def say_finished(self, progress: Progress, why: str) -> None:
        """Say that there is nothing to train, what has changed since, and what to do."""
        if self.group.is_main:
            since = f" with other settings, code or data since then ({'; '.join(self.changes)})" if self.changes else ""
            log.warning(
                "%s had finished before (step %d: %s) and was not trained%s; ask for more steps, name another run, or "
                'start afresh with resume="never"', self.directory or "the run", progress.step, why, since,
            )  # fmt: skip

    def _tell(self, message: str) -> None:
        """Say something that is no warning, also to those who have not set up logging."""
        if log.isEnabledFor(logging.INFO):
            log.info("%s", message)
        elif self.trainer.show_progress:
            print(f"etude: {message}", file=sys.stderr, flush=True)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Write one row to metrics.jsonl and the loggers."""
        if self.metrics is not None:
            self.metrics.write(step, row)
            self.loggers.log(step, row)

    def transcribe(self, session: Session, step: int, rollouts: Rollouts, experience: Any) -> None:
        """Keep a few of a step's completions for people to read, if there is text; ranks call together."""
        if self.directory is None or not holds_text(rollouts.completed, session.policy):
            return
        path = Run(self.directory).transcripts_path
        if self.transcripts is None:
            self.transcripts = Transcripts(session.config.seed, self.group.ask_main(lambda: read_rows(path)))
        rows = self.transcripts.choose(
            step, [] if rollouts.are_padding else rollouts.completed, experience, session.policy, session.gather,
            step == session.total_steps,
        )  # fmt: skip
        if rows and self.group.is_main:
            with refused_writes(self.directory):
                self._written = self._written or StepLog(path)
            for row in rows:
                self._written.append(redact_tree(row))

    def save(self, tree: Mapping[str, Any], step: int, metric: float | None) -> None:
        """Hand a checkpoint to the background writer: all of it on rank 0, or on every rank its part."""
        if self.store is not None and self._writes:
            if not self._said_size and self.group.is_main:
                self._say_size(tree)
            self.store.save(tree, step=step, metric=metric, name=self._name_of(step))

    def _name_of(self, step: int) -> str | None:
        """Return `epoch_3` for the first checkpoint after three epochs of a policy made of components."""
        epochs, before = (int(self.trainer.data.epochs(at) + 1e-9) for at in (step, max(step - 1, 0)))
        return f"epoch_{epochs}" if isinstance(self.trainer.policy, nn.ModuleDict) and epochs > before else None

    def _say_size(self, tree: Mapping[str, Any]) -> None:
        """Say once what checkpoints take, before a disk is full of them."""
        self._said_size = True
        sizes = {part: sum(t.nbytes for t in split_tensors(value)[1].values()) for part, value in tree.items()}
        total = sum(sizes.values())
        if total < LARGE_BYTES:
            return
        config, most = self.trainer.config, self.trainer.config.keep_last
        parts = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes.items() if size >= 0.05 * total)
        log.warning(
            "each checkpoint takes %.1f GB (%s), and %s are kept in %s: see training.keep_last and keep_best",
            total / 1e9, parts, "all" if most is None else f"up to {most + config.keep_best}", self.directory,
        )  # fmt: skip

    def reserve(self, tree: Mapping[str, Any]) -> None:
        """Get memory ready for saves like this one, so that the first does not wait for it."""
        if self.store is not None and self._writes:
            self.store.reserve(tree)

    def wait(self) -> str | None:
        """Wait until everything is on disk; return what went wrong, if anything did."""
        if self.store is None or not self._writes:
            return None
        try:
            self.store.wait()
        except CheckpointError as error:
            return str(error)
        return None

    def finish(self, progress: Progress, error: BaseException | None, stopped: str | None) -> None:
        """Write how the run ended."""
        run = self.trainer.run
        if run is None or self.store is None:
            return
        self.wait()
        if not self.group.is_main:
            return
        # A run that failed before it could be taken up stands where it stood.
        reached = {"step": progress.step} if self.metrics is not None else {}
        try:
            if error is None:
                run.set_status("finished", **reached, stopped=stopped or "finished")
            elif isinstance(error, Interrupted):
                run.set_status("interrupted", **reached, error=error.message)
            else:
                run.set_status("failed", **reached, error=f"{type(error).__name__}: {error}")
        except OSError as fault:  # checkpoints are there or were reported; how it ended is the lesser loss
            log.warning("how the run ended could not be written to %s: %s", run.dir, fault.strerror or fault)

    @property
    def best(self) -> Path | None:
        """The best checkpoint so far."""
        return self.store.best if self.store is not None else None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint."""
        return self.store.last if self.store is not None else None


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Return the settings that differ, as `training.lr: 0.1 -> 0.2`."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        keys = [*before, *(key for key in now if key not in before)]
        return [
            line
            for key in keys
            for line in _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        ]
    return [] if before == now else [f"{path}: {before} -> {now}"]
