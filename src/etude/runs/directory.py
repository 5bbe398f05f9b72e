"""A run is a directory: config, environment, status, metrics and checkpoints. Imports no torch until one is loaded."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from etude.errors import ConfigError, no_place
from etude.reading import yaml12
from etude.reading.plain import map_leaves
from etude.runs.durable import is_this_host, process_alive, write_atomically
from etude.runs.evaluations import Evaluation, read_evaluations
from etude.runs.leading import is_quiet, lead
from etude.runs.metrics import MetricsLog, last_metrics
from etude.secrets import holds_secret, redact_tree

if TYPE_CHECKING:
    from etude.runs.checkpoint import Checkpoint, CheckpointStore

State = Literal["running", "finished", "interrupted", "failed"]

_NAME = re.compile(r"[^A-Za-z0-9._-]+")
# Config files are parsed in milliseconds, and a list may have hundreds of them.
_BEST_METRIC = re.compile(r"^  best_metric: ['\"]?([^'\"\s]+)", re.MULTILINE)


class Run:
    """The directory of one run, and the names of the things in it."""

    def __init__(self, directory: Path | str) -> None:
        self.dir = Path(directory)

    @classmethod
    def create(cls, root: Path | str = "runs", name: str | None = None) -> Run:
        """Make a new directory that nobody else has: `root/NAME`, `root/NAME-2`, ...; without a name, by the time."""
        stem = _NAME.sub("-", name or "").strip("-.")[:100] or f"{datetime.now():%Y%m%d-%H%M%S}-run"
        count = 1
        while True:
            directory = Path(root) / (stem if count == 1 else f"{stem}-{count}")
            try:
                Path(root).mkdir(parents=True, exist_ok=True)
                directory.mkdir()
                return cls(directory)
            except FileExistsError as error:
                if not directory.exists():  # it is the root that is there, as a file
                    raise no_place(error, directory) from None
                count += 1
            except OSError as error:
                raise no_place(error, directory) from None

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.dir.resolve().name

    def exists(self) -> bool:
        """Tell whether the directory holds what a run leaves behind."""
        return any((self.dir / name).exists() for name in ("status.json", "metrics.jsonl", "checkpoints"))

    @property
    def config_path(self) -> Path:
        """Where the resolved configuration is."""
        return self.dir / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """Where the metrics are."""
        return self.dir / "metrics.jsonl"

    @property
    def transcripts_path(self) -> Path:
        """Where a few of the completions are that a language model wrote in training."""
        return self.dir / "transcripts.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        """Where the checkpoints are."""
        return self.dir / "checkpoints"

    def checkpoints(self, **options: Any) -> CheckpointStore:
        """Open the run's checkpoints; the options are those of `CheckpointStore`."""
        from etude.runs.checkpoint import CheckpointStore

        return CheckpointStore(self.checkpoints_dir, **options)

    def choose_checkpoint(self, which: str = "auto") -> tuple[Checkpoint, str]:
        """Load a checkpoint, and tell by which name, if not by its step.

        Args:
            which: best, last, a step, or auto for the best if there is one and the last if not.
        """
        training = self.read_config().get("training") or {}
        store = self.checkpoints(best_mode=training.get("best_mode", "min"))
        if which == "auto":
            which = "best" if store.best is not None else "last"
        return store.load(int(which) if which.isdecimal() else which), "" if which.isdecimal() else which

    def metrics(self, **options: Any) -> MetricsLog:
        """Open metrics.jsonl for appending."""
        return MetricsLog(self.metrics_path, **options)

    def write_config(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Store the resolved configuration as config.yaml; refuse values that hold a secret.

        Returns:
            The configuration that it replaces, if there was another one.
        """
        text = yaml12.write(_plain(config, ""))
        try:
            if self.config_path.read_text() == text:
                return None
        except FileNotFoundError:
            before = None
        else:
            before = self.read_config()
        self._write("config.yaml", text)
        return before

    def read_config(self) -> dict[str, Any]:
        """Return the stored configuration, empty if there is none."""
        try:
            content = yaml12.read(self.config_path.read_text()).value
        except FileNotFoundError:
            return {}
        except yaml12.ReadError as error:
            raise ConfigError(f"{self.config_path} is not YAML: {error}") from None
        return content if isinstance(content, dict) else {}

    def best_metric(self) -> str | None:
        """Return the metric that ranks checkpoints, if the configuration chooses one; cheap, and never an error."""
        try:
            found = _BEST_METRIC.search(self.config_path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return None
        return found[1] if found else None

    def write_environment(self) -> None:
        """Store versions, machine, git state and command line as environment.json."""
        from etude.runs.environment import describe_environment

        self._write("environment.json", json.dumps(describe_environment(), indent=2) + "\n")

    def set_status(self, state: State, **facts: Any) -> None:
        """Record how the run stands; facts given earlier stay unless given again."""
        if state not in get_args(State):
            raise ValueError(f"unknown state {state!r}; one of {', '.join(get_args(State))}")
        now = time.time()
        before = self.status()
        spent_s = float(before.get("duration_s", 0.0))
        if before.get("state") == "running" and before.get("pid") == os.getpid():
            spent_s += max(0.0, now - float(before.get("updated", now)))
        status = {
            **before,
            **redact_tree(facts),
            "state": state,
            "started": before.get("started", now),
            "updated": now,
            "duration_s": spent_s,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._write("status.json", json.dumps(map_leaves(status, _finite), indent=2, default=str) + "\n")

    def status(self) -> dict[str, Any]:
        """Return what `set_status` recorded; empty if nothing readable was, and without values that make no sense."""
        status = self._read_status()
        return {} if status is None else sound_status(status)

    def _read_status(self) -> dict[str, Any] | None:
        try:
            status = json.loads((self.dir / "status.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return status if isinstance(status, dict) else None

    def state(self) -> str:
        """Return the state: "killed" if its process is gone without a word, "unreadable" if status.json is."""
        status = self._read_status()
        if status is None:
            return "unreadable" if os.path.lexists(self.dir / "status.json") else "unknown"
        status = sound_status(status)
        state = str(status.get("state", "unknown"))
        if state == "running" and "pid" in status and is_this_host(status.get("host", "")):
            return state if process_alive(status["pid"]) else "killed"
        return state

    def _write(self, name: str, text: str) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.dir / name, text.encode())

    def __repr__(self) -> str:
        return f"Run({str(self.dir)!r})"

    @staticmethod
    def list(root: Path | str = "runs") -> tuple[RunSummary, ...]:
        """Return a summary of every run under `root`, newest first."""
        return tuple(list_runs(root))


@dataclass(frozen=True)
class RunSummary:
    """One line of `etude runs`."""

    name: str
    path: Path
    state: str
    step: int | None
    metrics: dict[str, float] = field(default_factory=dict)
    started: float | None = None
    """Seconds since 1970."""
    duration_s: float = 0.0
    """Wall-clock seconds over all sessions."""
    leading: list[str] = field(default_factory=list)
    """The metrics that matter, in order."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """What `etude evaluate` found."""


def list_runs(root: Path | str = "runs") -> list[RunSummary]:
    """Return a summary of every run under `root`, newest first."""
    try:
        entries = [Path(root) / name for name in os.listdir(root)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [_summarize(Run(path)) for path in entries if os.path.lexists(path / "status.json")]
    return sorted(found, key=lambda run: (run.started or 0.0, run.name), reverse=True)


def sound_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status without the values that cannot be meant: it may have been written by hand, or by any program."""
    return {name: value for name, value in status.items() if _SOUND.get(name, _anything)(value)}


def _anything(value: Any) -> bool:
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e11  # the year 5138; a datetime ends at 9999


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "state": _is_text, "host": _is_text, "error": _is_text, "stopped": _is_text,
    "pid": lambda value: _is_count(value) and value > 0, "step": _is_count, "parameters": _is_count,
    "trainable_parameters": _is_count, "started": _is_time, "updated": _is_time, "duration_s": _is_time,
    "warnings": lambda value: isinstance(value, list),
}  # fmt: skip


def resolve_run(
    run: str | Path | Run | None, *, root: Path | str = "runs", name: str | None = None, resume: str | Path = "auto"
) -> Run:
    """Return the run that is meant: None makes a new one, a bare name is under `root`, a path is itself.

    Its directory is there afterwards, or a `ConfigError` says why it cannot be.
    """
    if run is None:
        return Run.create(root, name)
    if not isinstance(run, Run):
        path = Path(run).expanduser()
        if path.name in ("", ".."):
            raise ConfigError(f"{str(run)!r} does not name a run directory")
        bare = isinstance(run, str) and os.sep not in run and not path.is_absolute()
        run = Run(Path(root) / path if bare else path)
    if run.dir.exists() and not run.dir.is_dir():
        raise ConfigError(f"the run directory {run.dir} is a file; give another name")
    if resume == "never":
        # Start afresh beside what is there: nothing is overwritten.
        wanted = run.dir
        names = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
        while any(run.checkpoints_dir.glob("step-*")):
            run = Run(next(names))
    try:
        run.dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise no_place(error, run.dir) from None
    return run


def _summarize(run: Run) -> RunSummary:
    status, state = run.status(), run.state()
    latest = last_metrics(run.metrics_path)
    step = status.get("step", latest.pop("step", None))
    latest.pop("step", None)
    numbers = {name: value for name, value in latest.items() if isinstance(value, int | float)}
    duration_s = float(status.get("duration_s", 0.0))
    if state == "running":
        duration_s += max(0.0, time.time() - float(status.get("updated", time.time())))
    leading = [name for name in lead(numbers, run.best_metric()) if not is_quiet(name)]
    return RunSummary(
        run.name, run.dir, state, step, numbers, status.get("started"), duration_s, leading, read_evaluations(run.dir)
    )


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as config.yaml holds it."""
    plain: dict[str, Any] = _plain(config, "")
    return plain


def _plain(value: Any, path: str) -> Any:
    """Return a configuration value as what YAML can hold; refuse secrets and objects, naming where they are."""
    if isinstance(value, Mapping):
        return {_plain(key, path): _plain(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "get_secret_value") or holds_secret(value):
        raise ConfigError(f"{path}: the value holds a secret and is not stored; write ${{env:NAME}} instead")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump(mode="json"), path)
    raise ConfigError(f"{path}: a {type(value).__name__} cannot be stored in config.yaml; give plain values")


def _finite(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not abs(value) < float("inf") else value
