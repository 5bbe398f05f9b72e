"""When the ground goes: no room on the disk, a broken one, a size limit, a closed terminal. One sentence, one code."""

from __future__ import annotations

import errno
import os
import pty
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.errors import CheckpointError, NonFiniteError
from etude.runs import durable
from etude.runs.checkpoint import CheckpointStore
from etude.runs.directory import Run
from tests.processes import reap, run_ranks, spawn, wait_for
from tests.unit.cli.test_train import CONFIG, ENVIRONMENT


class Mean(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(size))

    def forward(self, batch: Any) -> Any:
        return {"loss": (batch["x"] - self.at.sum()).square().mean()}


class Lose(Callback):
    """Lose the ground after the third step."""

    def __init__(self, lose: Any) -> None:
        self.lose = lose

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step == 3:
            self.lose()


def train(
    run: Path, lose: Any = lambda: None, steps: int = 8, size: int = 3, nan_from: int = 99, **options: Any
) -> Any:
    x = torch.ones(16, 3)
    x[nan_from:] = float("nan")
    config = TrainingConfiguration(training_steps=steps, batch_size=1, shuffle=False, log_every=1, **options)
    return Trainer(Mean(size), {"x": x}, config=config, run=run, callbacks=[Lose(lose)], show_progress=False).fit()


def fail_with(number: int, monkeypatch: pytest.MonkeyPatch, what: str = "write") -> Any:
    """Return a function after which the system refuses every write (or sync) of a run directory."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return lambda: monkeypatch.setattr(durable.os, what, refuse)


REFUSALS = [(errno.ENOSPC, "write"), (errno.EIO, "fsync"), (errno.EDQUOT, "write"), (errno.EROFS, "open")]


@pytest.mark.parametrize("number, what", REFUSALS)
def test_a_disk_that_refuses_does_not_replace_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, what: str
) -> None:
    with pytest.raises(NonFiniteError, match="step 5"):
        train(tmp_path / "run", fail_with(number, monkeypatch, what), nan_from=5)
    monkeypatch.undo()
    assert f"how the run ended could not be written to {tmp_path / 'run'}: {os.strerror(number)}" in caplog.text


@pytest.mark.parametrize("number, what", REFUSALS)
def test_a_last_save_that_the_disk_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"step 8 could not be written to .*: {os.strerror(number)}"):
        train(tmp_path / "run", fail_with(number, monkeypatch, what))


@pytest.mark.parametrize("number, what", REFUSALS)
def test_a_run_that_cannot_even_begin_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    fail_with(number, monkeypatch, what)()
    with pytest.raises(CheckpointError, match=rf"cannot be written \({os.strerror(number)}\)"):
        train(tmp_path / "run")


def test_a_size_limit_on_files_is_one_sentence_and_its_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", size=300_000, steps=2)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    assert run_ranks(lambda: train(tmp_path / "run", limit, size=300_000), 1) == [CheckpointError.exit_code]
    shown = capfd.readouterr().err
    assert "CheckpointError: the checkpoint of step 8 could not be written" in shown
    assert "File too large" in shown
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load("last").step == 2


def test_a_closed_terminal_saves_like_a_polite_request(tmp_path: Path) -> None:
    (pid,) = spawn(lambda: train(tmp_path / "run", steps=10**6, save_every=None))
    wait_for(tmp_path / "run" / "metrics.jsonl")
    time.sleep(0.1)
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGHUP)  # kernel and shell both tell it; the second is no request to hurry
    assert reap([pid], 60) == [128 + signal.SIGHUP]
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load().step > 0
    assert Run(tmp_path / "run").state() == "interrupted"


def test_nohup_is_respected(tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        train(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGHUP))

    assert run_ranks(work, 1) == [0]


@pytest.mark.slow
def test_a_command_whose_terminal_goes_away_saves_and_exits_with_129(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(CONFIG)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        command = [sys.executable, "-m", "etude", "train", "x.yaml", "training.training_steps=1000000"]
        os.execve(sys.executable, command, {**ENVIRONMENT, "TERM": "xterm"})
    wait_for(tmp_path / "runs" / "tiny" / "metrics.jsonl", 60)
    os.close(terminal)
    assert reap([pid], 60) == [128 + signal.SIGHUP]
    assert CheckpointStore(tmp_path / "runs" / "tiny" / "checkpoints").load().step > 0
