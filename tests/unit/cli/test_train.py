"""`etude train` and `etude resume`, as real processes: output, exit codes, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.main import app, main
from etude.cli.train import _figures
from etude.config.build import build, name_after
from etude.config.load import load
from etude.errors import ConfigError, EtudeError
from etude.runs.directory import Run, resolve_run
from etude.runs.metrics import read_metrics
from etude.types import Result as TrainingResult
from tests.processes import run_forked

runner = CliRunner()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
CONFIG = """\
policy: mlp
data: digits
training: {batch_size: 8, training_steps: 6, log_every: 2}
run: {name: tiny}
loggers: []
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(CONFIG)
    return tmp_path


def etude(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=100)


def test_both_spellings_of_the_config_take_overrides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, list[str], str, str | None]] = []
    monkeypatch.setattr("etude.cli.train.train_config", lambda *call: calls.append(call))
    runner.invoke(app, ["train", "x.yaml", "a=1", "b=2"])
    runner.invoke(app, ["train", "--train_config", "x.yaml", "a=1", "b=2"])
    runner.invoke(app, ["train", "a=1", "b=2", "--train-config", "x.yaml", "--resume", "never"])
    runner.invoke(app, ["train", "-m", "self-hosted", "-c", "x.yaml", "a=1", "--run-nexrl", "-t", "first"])
    assert calls[:3] == [(Path("x.yaml"), ["a=1", "b=2"], resume, None) for resume in ("auto", "auto", "never")]
    assert calls[3:] == [(Path("x.yaml"), ["a=1", "run.name=first"], "auto", "self-hosted")]


def test_a_run_without_a_config_cannot_be_resumed_by_name(folder: Path) -> None:
    Run(Path("runs/bare")).set_status("finished", step=1)
    error = runner.invoke(app, ["resume", "bare"]).exception
    assert isinstance(error, ConfigError)
    assert "no config.yaml" in str(error)
    assert isinstance(runner.invoke(app, ["resume", "absent"]).exception, EtudeError)


@pytest.mark.slow
def test_a_run_is_trained_lengthened_and_left_in_one_place(folder: Path) -> None:
    done = etude("train", "x.yaml", "training.lr=2e-3")
    assert done.returncode == 0, done.stderr
    assert "step 2/6  loss " in done.stderr
    assert done.stdout.splitlines()[0].startswith("reached step 6 in ")
    assert "run: runs/tiny" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr

    arguments = ["etude", "resume", "tiny", "training.training_steps=8"]
    done = run_forked(main, env=ENVIRONMENT, arguments=arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reached step 8")
    assert [path.name for path in (folder / "runs").iterdir()] == ["tiny"]
    run = Run(Path("runs/tiny"))
    assert run.status()["step"] == 8
    assert run.read_config()["training"]["lr"] == 2e-3
    assert [row["step"] for row in read_metrics(run.metrics_path) if "train/loss" in row] == [2, 4, 6, 8]


def test_runs_are_named_after_their_config(folder: Path) -> None:
    (folder / "x.yaml").write_text(CONFIG.replace("run: {name: tiny}\n", ""))
    trainer = build(load("x.yaml"))
    assert (trainer.run_request, trainer.name) == (None, "x")
    assert [resolve_run(None, root="runs", name=trainer.name).name for _ in range(2)] == ["x", "x-2"]
    assert name_after("runs/x/config.yaml") == "x", "the stored configuration of a run"
    assert name_after("configs/rl/digits-grpo.yaml") == "digits-grpo"


@pytest.mark.slow
def test_bad_input_ends_in_a_sentence_and_a_code(folder: Path) -> None:
    done = etude("train", "x.yaml", "training.lrr=1")
    assert done.returncode == ConfigError.exit_code
    assert done.stderr.startswith("etude: error: override 'training.lrr=1': training.lrr: unknown key")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not Path("runs").exists()
    missing = run_forked(main, env=ENVIRONMENT, arguments=["etude", "train", "absent.yaml"])
    assert missing.returncode == ConfigError.exit_code
    assert "absent.yaml" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signum,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_with_its_code(folder: Path, signum: int, code: int) -> None:
    command = [sys.executable, "-m", "etude", "train", "x.yaml", "training.training_steps=1000000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert child.stderr is not None
    assert child.stderr.readline().startswith("training ")
    assert child.stderr.readline().startswith("step 2/")
    child.send_signal(signum)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code
    step = Run(Path("runs/tiny")).status()["step"]
    how = f"saved at step {step}, go on with: etude resume tiny"
    assert f"etude: interrupted by {signal.Signals(signum).name}; {how}" in err
    assert "Traceback" not in err
    run = Run(Path("runs/tiny"))
    assert run.state() == "interrupted"
    assert run.checkpoints().steps() == [run.status()["step"]]
    assert out == ""


@pytest.mark.slow
def test_the_command_runs_under_torchrun(folder: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", "etude", "train", "x.yaml",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached step 6") == 1
    assert Run(Path("runs/tiny")).state() == "finished"


def test_a_result_leads_with_the_reward_and_its_best(folder: Path) -> None:
    run = Run(Path("runs/chat"))
    with run.metrics() as metrics:
        for step, reward in ((5, 0.25), (10, 0.75), (15, 0.5)):
            metrics.write(step, {"train/loss": 0.0, "train/clip_fraction": 0.125, "train/reward": reward})
    last = {"train/loss": 0.0, "train/clip_fraction": 0.125, "train/reward": 0.5, "lr/policy": 1e-3}
    shown = _figures(TrainingResult(15, last, run.dir, None, None))
    assert shown == ["train/reward 0.5 (best 0.75 at step 10)", "train/clip_fraction 0.125", "train/loss 0"]
