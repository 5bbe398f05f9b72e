from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from etude import secrets
from etude.errors import MissingExtraError
from etude.runs import loggers
from etude.runs.loggers import LoggerGroup, MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from etude.types.protocols import Logger

CANARY = "canary-90aa31c7"
ALL = [TensorBoardLogger, WandbLogger, MlflowLogger, TrackioLogger]


class Recorder:
    """A logger that remembers, and fails where it is told to."""

    def __init__(self, fail_in: str = "", error: BaseException | None = None) -> None:
        self.calls: list[Any] = []
        self._fail_in, self._error = fail_in, error or RuntimeError("the server is on fire")

    def _call(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details))
        if name == self._fail_in:
            raise self._error

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        self._call("start", run_dir, config, first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", step, dict(metrics))

    def close(self) -> None:
        self._call("close")


def run_group(group: LoggerGroup, directory: Path, steps: int = 3) -> None:
    group.start(directory, {"lr": 0.1}, 0)
    for step in range(1, steps + 1):
        group.log(step, {"loss": 1 / step})
    group.close()


def test_every_logger_gets_every_row_in_order(tmp_path: Path) -> None:
    one, two = Recorder(), Recorder()
    run_group(LoggerGroup([one, two]), tmp_path)
    expected = [("start", tmp_path, {"lr": 0.1}, 0), *[("log", n, {"loss": 1 / n}) for n in (1, 2, 3)], ("close",)]
    assert one.calls == two.calls == expected


@pytest.mark.parametrize("error", [RuntimeError("the server is on fire"), SystemExit("bye"), MemoryError("too much")])
@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_logger_that_fails_is_reported_once_and_stops_nothing(
    tmp_path: Path, where: str, error: BaseException
) -> None:
    warnings: list[str] = []
    good, bad = Recorder(), Recorder(where, error)
    run_group(LoggerGroup([bad, good], on_warning=warnings.append), tmp_path)
    assert len(good.calls) == 5
    (warning,) = warnings
    assert "Recorder" in warning
    assert str(error) in warning
    assert "training goes on" in warning
    assert sum(call[0] == "log" for call in bad.calls) == {"start": 0, "log": 1, "close": 3}[where]


def test_a_logger_that_hangs_is_left_behind(tmp_path: Path) -> None:
    release = threading.Event()
    warnings: list[str] = []

    class Hanging(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            release.wait(30)

    group = LoggerGroup([Hanging()], on_warning=warnings.append)
    group.start(tmp_path, {}, 0)
    for step in range(loggers._BACKLOG_ROWS + 10):
        group.log(step, {"x": 1.0})
    group.close(timeout_s=0.05)
    release.set()
    assert len(warnings) == 1
    assert "behind" in warnings[0]


def test_a_logger_that_does_not_end_is_reported(tmp_path: Path) -> None:
    release = threading.Event()
    warnings: list[str] = []

    class Endless(Recorder):
        def close(self) -> None:
            release.wait(30)

    run_group_with_patience = LoggerGroup([Endless()], on_warning=warnings.append)
    run_group_with_patience.start(tmp_path, {}, 0)
    run_group_with_patience.close(timeout_s=0.05)
    release.set()
    assert warnings == ["Endless did not finish within 0.05 s; training goes on without it"]


def test_a_logger_that_is_slow_to_start_is_waited_for_only_so_long(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(Recorder):
        def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
            release.wait(30)

    slow = Slow()
    group = LoggerGroup([slow])
    group.start(tmp_path, {}, 0, timeout_s=0.05)
    group.log(1, {"x": 1.0})
    release.set()
    group.close()
    assert [call[0] for call in slow.calls] == ["log", "close"]


def test_a_failure_to_start_is_known_when_start_returns(tmp_path: Path) -> None:
    warnings: list[str] = []
    group = LoggerGroup([Recorder("start")], on_warning=warnings.append)
    group.start(tmp_path, {}, 0)
    assert len(warnings) == 1
    group.close()


def test_a_group_that_never_started_closes_quietly() -> None:
    group = LoggerGroup([Recorder()])
    group.log(1, {"x": 1.0})
    group.close()


def test_secrets_reach_neither_loggers_nor_their_error_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "_spellings", ())
    secrets.register_secret(CANARY)
    warnings: list[str] = []
    bad = Recorder("log", RuntimeError(f"401 for https://{CANARY}@host"))
    group = LoggerGroup([bad], on_warning=warnings.append)
    group.start(tmp_path, {"a": {"url": f"x{CANARY}"}}, 0)
    group.log(1, {"x": 1.0})
    group.close()
    assert bad.calls[0][2] == {"a": {"url": "x***"}}
    assert CANARY not in warnings[0]


@pytest.mark.parametrize("kind", ALL)
def test_the_built_in_loggers_fit_the_protocol(kind: Callable[[], Logger]) -> None:
    assert isinstance(kind(), Logger)
    kind().close()


@pytest.mark.parametrize("kind", ALL)
def test_a_missing_package_names_the_extra_and_only_costs_that_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Logger]
) -> None:
    package = kind.__name__.removesuffix("Logger").lower()  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed; pip install 'etude\[report\]'"):
        kind().start(tmp_path, {}, 0)
    warnings: list[str] = []
    run_group(LoggerGroup([kind()], on_warning=warnings.append), tmp_path)
    assert len(warnings) == 1
    assert "etude[report]" in warnings[0]


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written_even_without_close(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path, {"training": {"lr": 1e-3}}, 0)
    logger.log(1, {"train/loss": 0.5, "lr/policy": 0.25})
    logger.log(2, {"train/loss": math.inf})
    found = scalars(tmp_path / "tensorboard")
    assert found == {"train/loss": [(1, 0.5), (2, math.inf)], "lr/policy": [(1, 0.25)]}
    logger.close()


def test_tensorboard_shows_the_config_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger()
    logger.start(tmp_path, {"training": {"lr": 0.5}, "path": tmp_path}, 0)
    logger.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Tensors("config")
    assert b"lr: 0.5" in event.tensor_proto.string_val[0]


def test_a_resumed_run_replaces_the_rows_after_its_checkpoint_in_tensorboard(tmp_path: Path) -> None:
    for first_step, value in ((0, 1.0), (2, 2.0), (3, 3.0)):
        logger = TensorBoardLogger()
        logger.start(tmp_path, {}, first_step)
        for step in range(first_step + 1, first_step + 5):
            logger.log(step, {"x": value})
        logger.close()
    assert scalars(tmp_path / "tensorboard")["x"] == [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (6, 3), (7, 3)]


def run_child(code: str, environment: dict[str, str], **extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **extra},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]


SESSIONS = """
import sys
from pathlib import Path
from etude.runs.loggers import LoggerGroup, {kind}
from etude.secrets import register_secret
register_secret("{canary}")
sys.argv = ["etude", "key={canary}"]
problems = []
for first_step in (0, 2):
    group = LoggerGroup([{kind}({arguments})], on_warning=problems.append)
    config = {{"lr": 0.1, "url": "https://{canary}@host", "nested": {{"a": [1, None]}}}}
    group.start(Path({directory!r}), config, first_step)
    for step in range(first_step + 1, first_step + 4):
        group.log(step, {{"train/loss": 1.0 / step, "grad norm (policy)": float("nan")}})
    group.close(60)
    assert not problems, problems
"""


def sessions(kind: str, directory: Path, arguments: str = "") -> str:
    return SESSIONS.format(kind=kind, directory=str(directory), arguments=arguments, canary=CANARY)


def assert_no_canary(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_wandb_logs_offline_and_a_resumed_run_keeps_its_id(tmp_path: Path, child_env: dict[str, str]) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra: report)")
    run_child(sessions("WandbLogger", tmp_path / "run"), child_env, ETUDE_SECRET=CANARY)
    folders = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    # Two sessions within one second get folders `...-ID` and `...-ID-1`; the file inside is named by the id alone.
    identifiers = [path.name for folder in folders for path in folder.glob("run-*.wandb")]
    assert len(identifiers) == 2
    assert len(set(identifiers)) == 1
    assert_no_canary(tmp_path / "run")


@pytest.mark.slow
def test_mlflow_logs_to_a_file_in_the_run_directory_and_resumes_the_same_run(
    tmp_path: Path, child_env: dict[str, str]
) -> None:
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra: report)")
    check = """
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///" + {path!r})
(run,) = client.search_runs([client.get_experiment_by_name("etude").experiment_id])
history = client.get_metric_history(run.info.run_id, "train/loss")
assert sorted((m.step, m.value) for m in history) == [(1, 1.0), (2, 0.5), (3, 1 / 3), (3, 1 / 3), (4, 0.25), (5, 0.2)]
assert run.data.params["nested.a"] == "[1, None]" and run.data.params["url"] == "https://***@host"
assert run.info.status == "FINISHED"
"""
    code = sessions("MlflowLogger", tmp_path / "run") + check.format(path=str(tmp_path / "run" / "mlflow.db"))
    run_child(code, child_env, ETUDE_SECRET=CANARY)
    assert_no_canary(tmp_path / "run")


@pytest.mark.slow
def test_trackio_logs_to_its_local_database(tmp_path: Path, child_env: dict[str, str]) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed (extra: report)")
    store = tmp_path / "trackio"
    run_child(sessions("TrackioLogger", tmp_path / "run"), child_env, TRACKIO_DIR=str(store), ETUDE_SECRET=CANARY)
    assert [path.name for path in store.glob("*.db")] == ["etude.db"]
    assert b"train/loss" in b"".join(path.read_bytes() for path in store.glob("etude.db*"))
    assert_no_canary(store)


def test_importing_the_loggers_imports_none_of_their_packages() -> None:
    code = "import sys, etude.runs.loggers\n"
    code += "raise SystemExit(any(n in sys.modules for n in ('torch', 'wandb', 'mlflow', 'trackio', 'tensorboard')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ, timeout=100).returncode == 0
