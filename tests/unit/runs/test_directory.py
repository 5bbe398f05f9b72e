from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import SecretStr

from etude import secrets
from etude.config.training import TrainingConfiguration
from etude.errors import ConfigError
from etude.runs.directory import Run, list_runs, resolve_run

CANARY = "canary-4f1e77b2"


@pytest.fixture(autouse=True)
def _canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_spellings", ())
    monkeypatch.setenv("ETUDE_TEST_SECRET", CANARY)
    secrets.register_secret(CANARY)


def test_the_config_is_stored_as_yaml_that_reads_back_equal(tmp_path: Path) -> None:
    config = {
        "training": {"lr": 1e-4, "clip_norm": None, "betas": (0.9, 0.999)},
        "name": "ü: yes",
        "key": "${env:TOKEN}",
    }
    run = Run(tmp_path / "run")
    run.write_config(config)
    assert run.read_config() == {**config, "training": {"lr": 1e-4, "clip_norm": None, "betas": [0.9, 0.999]}}
    assert list(yaml.safe_load(run.config_path.read_text())) == list(config)


def test_configuration_objects_are_stored_by_their_values(tmp_path: Path) -> None:
    Run(tmp_path).write_config({"training": TrainingConfiguration(training_steps=7), "root": Path("runs")})
    stored = Run(tmp_path).read_config()
    assert TrainingConfiguration(**stored["training"]) == TrainingConfiguration(training_steps=7)
    assert stored["root"] == "runs"


@pytest.mark.parametrize("value", [CANARY, f"https://user:{CANARY}@host", SecretStr("anything")])
def test_a_secret_in_the_config_is_refused_by_place_and_not_by_value(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"loggers\[0\]\.params\.url: .*\$\{env:NAME\}") as caught:
        Run(tmp_path).write_config({"loggers": [{"params": {"url": value}}]})
    assert CANARY not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_objects_in_the_config_are_refused_by_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.x: a object"):
        Run(tmp_path).write_config({"policy": {"x": object()}})


def test_status_is_kept_over_updates_and_sessions(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.status() == {}
    assert run.state() == "unknown"
    run.set_status("running", step=0)
    started = run.status()["started"]
    run.set_status("running", step=10, metrics={"loss": float("nan")})
    run.set_status("failed", error=f"cannot reach https://{CANARY}@host")
    status = run.status()
    assert (status["state"], status["step"], status["started"]) == ("failed", 10, started)
    assert status["error"] == "cannot reach https://***@host"
    assert status["metrics"] == {"loss": "nan"}
    with pytest.raises(ValueError, match="unknown state"):
        run.set_status("done")  # type: ignore[arg-type]


def test_a_damaged_status_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(b"{\xff")
    run = Run(tmp_path)
    assert run.status() == {}
    run.set_status("finished")
    assert run.state() == "finished"


def test_a_running_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    run = Run(tmp_path)
    run.set_status("running")
    assert run.state() == "running"
    status = run.status() | {"pid": child.pid}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert run.state() == "killed"
    (tmp_path / "status.json").write_text(json.dumps(status | {"host": "elsewhere"}))
    assert run.state() == "running"


def test_runs_are_listed_newest_first_with_what_matters(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = Run(tmp_path / name)
        run.set_status("running", step=5)
        with run.metrics() as log:
            log.write(5, {"train/loss": 0.5})
            log.write(5, {"eval/loss": 0.25})
        run.set_status("finished", step=6)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").touch()
    newest, oldest = Run.list(tmp_path)
    assert (newest.name, oldest.name) == ("two", "one")
    assert (newest.state, newest.step) == ("finished", 6)
    assert newest.metrics == {"train/loss": 0.5, "eval/loss": 0.25}
    assert newest.duration_s >= 0
    assert list_runs(tmp_path / "absent") == []


def test_new_runs_never_share_a_directory(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, "my policy/1") for _ in range(5)]
    assert [run.name for run in runs] == ["my-policy-1", *(f"my-policy-1-{number}" for number in range(2, 6))]
    assert all(run.dir.is_dir() for run in runs)
    unnamed = [Run.create(tmp_path) for _ in range(2)]
    assert len({run.dir for run in unnamed}) == 2 and all("-run" in run.name for run in unnamed)


def test_runs_are_found_by_name_path_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    assert resolve_run("act", root=root).dir == root / "act"
    assert resolve_run(str(tmp_path / "x" / "y"), root=root).dir == tmp_path / "x" / "y"
    assert resolve_run(Path("rel"), root=root).dir == Path("rel")
    run = Run(tmp_path)
    assert resolve_run(run) is run
    assert resolve_run(None, root=root, name="bc").dir.parent == root


@pytest.mark.parametrize("bad", ["", ".", "/", ".."])
def test_what_names_no_directory_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="does not name"):
        resolve_run(bad)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_run(tmp_path / "file")


def test_starting_anew_where_checkpoints_are_takes_a_directory_beside_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert resolve_run(run, resume="never") is run
    run.checkpoints().save({"model": {"w": torch.ones(1)}}, step=1, wait=True)
    assert resolve_run(run) is run
    assert resolve_run(run, resume="never").dir == tmp_path / "run-2"
    (tmp_path / "run-2" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert resolve_run(run, resume="never").dir == tmp_path / "run-3"


def test_a_secret_of_the_environment_is_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["etude", "train", f"x.url=https://{CANARY}@host"])
    run = Run(tmp_path / "run")
    run.write_config({"key": "${env:ETUDE_TEST_SECRET}"})
    run.write_environment()
    run.set_status("failed", error=f"bad key {CANARY}", nested={"argv": [CANARY]})
    run.checkpoints().save({"model": {"w": torch.ones(1)}}, step=1, wait=True)
    with run.metrics() as log:
        log.write(1, {"x": 1.0})
    files = [path for path in run.dir.rglob("*") if path.is_file()]
    assert len(files) >= 7
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]


def test_the_public_names_are_imported_when_used() -> None:
    import etude.runs

    assert etude.runs.Run is Run
    for name in etude.runs.__all__:
        assert getattr(etude.runs, name)
    with pytest.raises(AttributeError, match="nothing"):
        etude.runs.nothing  # noqa: B018
    code = "import sys, etude.runs; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ, timeout=100).returncode == 0


@pytest.mark.parametrize("root", ["file", "file/deeper", "/proc/nowhere"])
@pytest.mark.parametrize("run", [None, "named"])
def test_a_place_that_cannot_be_made_is_one_sentence(run: str | None, root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    with pytest.raises(ConfigError, match=r"^cannot use \S+: [^\n]+; make it writable, or name another place$"):
        resolve_run(run, root=tmp_path / root)
