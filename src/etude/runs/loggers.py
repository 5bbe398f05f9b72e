"""Where metrics go beside metrics.jsonl. Each logger imports its package when it starts; none can stop training."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import yaml

from etude.errors import MissingExtraError
from etude.reading.plain import map_leaves
from etude.secrets import redact, redact_tree
from etude.types.protocols import Logger

_BACKLOG_ROWS = 10_000
_files = itertools.count()


class LoggerGroup:
    """Many loggers as one, each on a thread of its own: one that fails or hangs is reported once and dropped."""

    def __init__(self, loggers: Iterable[Logger] = (), *, on_warning: Callable[[str], None] | None = None) -> None:
        """Take the loggers; `on_warning` may be called from their threads."""
        warn = on_warning or logging.getLogger(__name__).warning
        self._workers = [_Worker(logger, warn) for logger in loggers]

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int = 0, *, timeout_s: float = 30.0) -> None:
        """Begin, or go on after `first_step` steps; the config is handed on without secrets.

        Waits for the loggers, so that a missing package is reported before the first step and no process is forked
        in the middle of an import; one that needs longer than `timeout_s` seconds goes on starting by itself.
        """
        shown = redact_tree(dict(config))
        for worker in self._workers:
            worker.begin(Path(run_dir), shown, first_step)
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.ready.wait(max(0.0, deadline_s - time.monotonic()))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand the metrics of one step to every logger and return at once."""
        row = {name: float(value) for name, value in metrics.items()} if self._workers else {}
        for worker in self._workers:
            worker.put(step, row)

    def close(self, timeout_s: float = 30.0) -> None:
        """Let every logger finish; leave behind one that has not after `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.join(max(0.0, deadline_s - time.monotonic()), timeout_s)


class _Worker:
    """One logger, its thread and the rows that wait for it."""

    def __init__(self, logger: Logger, warn: Callable[[str], None]) -> None:
        self._logger = logger
        self._name = type(logger).__name__
        self._warn = warn
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_BACKLOG_ROWS)
        self._dropped = False
        self.ready = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        arguments = (run_dir, config, first_step)
        # A daemon: a logger that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, args=arguments, name=f"etude-{self._name}", daemon=True)
        self._thread.start()

    def put(self, step: int, row: dict[str, float]) -> None:
        if self._dropped or self._thread is None:
            return
        try:
            self._rows.put_nowait((step, row))
        except queue.Full:
            self._drop(f"is {_BACKLOG_ROWS} rows behind")

    def ask_to_end(self) -> None:
        with suppress(queue.Full):
            self._rows.put_nowait(None)

    def join(self, timeout_s: float, patience_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._drop(f"did not finish within {patience_s:g} s")

    def _work(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        try:
            self._logger.start(run_dir, config, first_step)
            self.ready.set()
            while (item := self._rows.get()) is not None and not self._dropped:
                self._logger.log(*item)
        except BaseException as error:  # noqa: BLE001 (whatever a logger raises, SystemExit too, stays here)
            self._drop(f"failed ({_describe(error)})")
            self.ready.set()
        try:
            self._logger.close()
        except BaseException as error:  # noqa: BLE001 (as above)
            self._drop(f"failed to close ({_describe(error)})")

    def _drop(self, problem: str) -> None:
        if not self._dropped:
            self._dropped = True
            self._warn(f"{self._name} {problem}; training goes on without it")


class TensorBoardLogger:
    """Writes TensorBoard event files into the run directory, each row at once, so that a crash loses none."""

    def __init__(self, directory: str = "tensorboard") -> None:
        """Take the name of the directory inside the run directory."""
        self._directory = directory
        self._file: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Open a new event file; what earlier sessions logged after `first_step` no longer counts."""
        self._event = _require("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        records = _require("tensorboard.summary.writer.record_writer", "tensorboard")
        summary = _require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        session = _require("tensorboard.compat.proto.event_pb2", "tensorboard").SessionLog
        directory = Path(run_dir) / self._directory
        directory.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names; nanoseconds keep two sessions of one second in order.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        session_name = f"{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._file = (directory / f"events.out.tfevents.{session_name}").open("wb")
        self._records = records.RecordWriter(self._file)
        self._summary = summary.Summary
        self._put(file_version="brain.Event:2")
        if first_step > 0:
            self._put(step=first_step + 1, session_log=session(status=session.START))
        if config:
            self._put(step=first_step, summary=self._config_summary(summary, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all metrics of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._put(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()

    def _put(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()

    def _config_summary(self, summary: Any, config: Mapping[str, Any]) -> Any:
        tensor = _require("tensorboard.compat.proto.tensor_pb2", "tensorboard").TensorProto
        types = _require("tensorboard.compat.proto.types_pb2", "tensorboard")
        plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
        lines = yaml.safe_dump(map_leaves(config, _as_data), sort_keys=False).splitlines()
        text = "\n".join(f"    {line}" for line in lines)
        content = tensor(dtype=types.DT_STRING, string_val=[text.encode()])
        metadata = summary.SummaryMetadata(plugin_data=plugin)
        return summary.Summary(value=[summary.Summary.Value(tag="config", metadata=metadata, tensor=content)])


class WandbLogger:
    """Logs to Weights & Biases; offline unless told otherwise (upload later with `wandb sync`)."""

    def __init__(
        self,
        project: str = "etude",
        mode: Literal["offline", "online", "disabled", "shared"] = "offline",
        entity: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        """Take the project and how to reach it; the key comes from WANDB_API_KEY."""
        self._project, self._mode, self._entity, self._name, self._tags = project, mode, entity, name, tags
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Begin a W&B run whose id belongs to this run directory, so that a resumed run continues it."""
        wandb = _require("wandb", "wandb")
        # Console, command line and code are ours to record, redacted; W&B would upload them as they are.
        settings = wandb.Settings(console="off", x_disable_meta=True, save_code=False, init_timeout=60, silent=True)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._name or Path(run_dir).resolve().name,
            tags=self._tags,
            mode=self._mode,
            dir=str(run_dir),
            id=_stable_id(run_dir),
            resume="allow",
            config=dict(config),
            settings=settings,
        )
        # Its own step only ever grows and would refuse the rows a resumed run repeats.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one row to W&B."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """End the W&B run."""
        if self._run is not None:
            self._run.finish()


class MlflowLogger:
    """Logs to MLflow: a server, or by default a database file in the run directory."""

    def __init__(self, tracking_uri: str | None = None, experiment: str = "etude", name: str | None = None) -> None:
        """Take the address of the tracking store (null: `mlflow.db` in the run directory) and the experiment."""
        self._tracking_uri, self._experiment, self._name = tracking_uri, experiment, name
        self._client: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Begin an MLflow run, or go on with the one of this run directory."""
        self._entities = _require("mlflow.entities", "mlflow")
        directory = Path(run_dir).resolve()
        uri = self._tracking_uri or f"sqlite:///{directory / 'mlflow.db'}"
        client = _require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(self._experiment)
        mark = _stable_id(run_dir)
        earlier = client.search_runs([experiment_id], filter_string=f"tags.etude_run = '{mark}'", max_results=1)
        if earlier:
            self._run_id = earlier[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {"etude_run": mark}
            created = client.create_run(experiment_id, tags=tags, run_name=self._name or directory.name)
            self._run_id = created.info.run_id
            parameters = [self._entities.Param(key, value[:6000]) for key, value in _flatten(config)]
            for start in range(0, len(parameters), 100):
                client.log_batch(self._run_id, params=parameters[start : start + 100])
        self._client = client

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one row as a batch."""
        now_ms = int(time.time() * 1000)
        rows = [self._entities.Metric(_mlflow_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        """End the MLflow run."""
        if self._client is not None:
            self._client.set_terminated(self._run_id, status="FINISHED")


class TrackioLogger:
    """Logs to trackio, which keeps a local database and shows it with `trackio show`."""

    def __init__(self, project: str = "etude", name: str | None = None) -> None:
        """Take the project and the name of the run (null: that of the run directory)."""
        self._project, self._name = project, name
        self._run: Any = None

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Begin a trackio run, or go on with the one of this name."""
        trackio = _require("trackio", "trackio")
        name = self._name or Path(run_dir).resolve().name
        # Its machine monitors start threads of their own; a logger that was not asked to measure the machine does not.
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = trackio.init(project=self._project, name=name, config=dict(config), resume="allow", **quiet)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one row to trackio."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """End the trackio run."""
        if self._run is not None:
            self._run.finish()


def _require(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == package:
            raise MissingExtraError(f"the package {package} is not installed; pip install 'etude[report]'") from None
        raise


def _stable_id(run_dir: Path) -> str:
    directory = Path(run_dir).resolve()
    return f"{directory.name[:40]}-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}"


def _describe(error: BaseException) -> str:
    return redact(f"{type(error).__name__}: {error}")


def _as_data(value: Any) -> Any:
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _flatten(config: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(config, Mapping) and config:
        for key, item in config.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix or "config", str(config)


def _mlflow_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. /:" else "_" for c in name)
