"""The run directory as a session sees it: rank 0 writes, every rank reads the same checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.duration import Progress
from etude.engines.distributed import Group
from etude.errors import CheckpointError, Interrupted
from etude.runs.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from etude.runs.directory import Run, resolve_run
from etude.runs.loggers import LoggerGroup
from etude.runs.metrics import MetricsLog
from etude.runs.tree import split_tensors

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")

LARGE_BYTES = 500_000_000
"""The size of a checkpoint from which it is worth a line."""


class Record:
    """Writes what a run leaves behind; with `run=False`, nothing at all."""

    def __init__(self, trainer: Trainer, group: Group, resume: str | Path) -> None:
        self.trainer, self.group, self.resume = trainer, group, resume
        self.directory: Path | None = None
        self.store: CheckpointStore | None = None
        self.metrics: MetricsLog | None = None
        self.loggers = LoggerGroup([])
        self._said_size = False

    def __enter__(self) -> Record:
        trainer, config = self.trainer, self.trainer.config
        request = trainer.run_request
        if request is False:
            return self
        if self.group.is_main:
            self.directory = resolve_run(request, root=trainer.run_root, name=trainer.name, resume=self.resume).dir
        self.directory = Path(self.group.gather(str(self.directory))[0])
        trainer.run = Run(self.directory)
        self.store = trainer.run.checkpoints(
            keep_last=config.keep_last, keep_best=config.keep_best, best_mode=config.best_mode, on_warning=self._warn
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.loggers.close()
        if self.metrics is not None:
            self.metrics.close()

    def _warn(self, message: str) -> None:
        if self.group.is_main:
            log.warning("%s", message)

    def find_checkpoint(self, resume: str | Path) -> dict[str, Any] | None:
        """Return the state to go on from, verified: the newest good one, the one named, or None to start afresh."""
        if str(resume) == "never" or (self.store is None and str(resume) == "auto"):
            return None
        found: list[str | None] = [None, None]
        checkpoint: Checkpoint | None = None
        if self.group.is_main:
            try:
                checkpoint = self._load(resume)
                found = [str(checkpoint.path), None]
            except FileNotFoundError:
                pass
            except CheckpointError as error:
                found = [None, str(error)]
        path, error_text = self.group.gather(found)[0]
        if error_text:
            raise CheckpointError(error_text)
        if path is None:
            return None
        if checkpoint is None:
            checkpoint = read_checkpoint(Path(path))
        if self.group.is_main:
            log.info("resuming from %s at step %d", checkpoint.path, checkpoint.step)
        return checkpoint.tree

    def _load(self, resume: str | Path) -> Checkpoint:
        if str(resume) == "auto":
            assert self.store is not None
            if not self.store.steps():
                raise FileNotFoundError
            return self.store.load("last")
        path = Path(resume)
        if (path / "checkpoints").is_dir():
            return CheckpointStore(path / "checkpoints", on_warning=self._warn).load("last")
        if not path.exists():
            raise CheckpointError(
                f"no checkpoint at {path}; resume takes 'auto', 'never', a checkpoint or a run directory"
            )
        return read_checkpoint(path)

    def start(self, progress: Progress, parameters: tuple[int, int]) -> None:
        """Open the metrics, cut back to where we go on from, and the loggers."""
        if self.directory is None or not self.group.is_main:
            return
        run = Run(self.directory)
        config = self.trainer.describe()
        before = run.write_config(config)
        if progress.step and before is not None:
            self._say_changes(before, config)
        run.write_environment()
        run.set_status("running", step=progress.step, trainable_parameters=parameters[0], parameters=parameters[1])
        self.metrics = MetricsLog(self.directory / "metrics.jsonl")
        self.metrics.truncate_after(progress.step)
        self.loggers = LoggerGroup(self.trainer.loggers)
        self.loggers.start(self.directory, config, progress.step)

    def _say_changes(self, before: Any, now: Any, path: str = "") -> None:
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            for key in [*before, *(key for key in now if key not in before)]:
                self._say_changes(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        elif before != now:
            log.info("configuration changed since the last session: %s: %s -> %s", path, before, now)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Write one row to metrics.jsonl and the loggers."""
        if self.metrics is not None:
            self.metrics.write(step, row)
            self.loggers.log(step, row)

    def save(self, tree: Mapping[str, Any], step: int, metric: float | None) -> None:
        """Hand a checkpoint to the background writer."""
        if self.store is not None and self.group.is_main:
            if not self._said_size:
                self._say_size(tree)
            self.store.save(tree, step=step, metric=metric)

    def _say_size(self, tree: Mapping[str, Any]) -> None:
        """Say once what checkpoints take, before a disk is full of them."""
        self._said_size = True
        sizes = {part: sum(t.nbytes for t in split_tensors(value)[1].values()) for part, value in tree.items()}
        total = sum(sizes.values())
        if total < LARGE_BYTES:
            return
        config = self.trainer.config
        parts = ", ".join(f"{part} {size / 1e9:.1f}" for part, size in sizes.items() if size >= 0.05 * total)
        log.warning(
            "each checkpoint takes %.1f GB (%s), and up to %d are kept in %s: see training.keep_last and keep_best",
            total / 1e9, parts, config.keep_last + config.keep_best, self.directory,
        )  # fmt: skip

    def reserve(self, tree: Mapping[str, Any]) -> None:
        """Get memory ready for saves like this one, so that the first does not wait for it."""
        if self.store is not None and self.group.is_main:
            self.store.reserve(tree)

    def wait(self) -> str | None:
        """Wait until everything is on disk; return what went wrong, if anything did."""
        if self.store is None or not self.group.is_main:
            return None
        try:
            self.store.wait()
        except CheckpointError as error:
            return str(error)
        return None

    def finish(self, progress: Progress, error: BaseException | None, stopped: str | None) -> None:
        """Write how the run ended."""
        run = self.trainer.run
        if not self.group.is_main or run is None or self.store is None:
            return
        self.wait()
        # A run that failed before it could be taken up stands where it stood.
        reached = {"step": progress.step} if self.metrics is not None else {}
        if error is None:
            run.set_status("finished", **reached, stopped=stopped or "finished")
        elif isinstance(error, Interrupted):
            run.set_status("interrupted", **reached, error=error.message)
        else:
            run.set_status("failed", **reached, error=f"{type(error).__name__}: {error}")

    @property
    def best(self) -> Path | None:
        """The best checkpoint so far."""
        return self.store.best if self.store is not None else None

    @property
    def last(self) -> Path | None:
        """The newest checkpoint."""
        return self.store.last if self.store is not None else None
