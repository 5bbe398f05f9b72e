"""Two trainings in one run directory: the second is refused, and what the first has written stays."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from etude import Trainer, TrainingConfiguration
from etude.cli.main import app
from etude.errors import DirectoryInUseError
from etude.runs.checkpoint import CheckpointStore
from tests.processes import kill, reap, run_ranks, spawn, wait_for


def train(
    run: Path, steps: int = 4, trainer: type[Trainer] = Trainer, resume: str | Path = "auto", **options: Any
) -> Any:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.at = nn.Parameter(torch.zeros(3))

        def forward(self, batch: Any) -> Any:
            return {"loss": (batch["x"] - self.at).square().mean()}

    config = TrainingConfiguration(training_steps=steps, batch_size=4, save_every=2, **options)
    data = {"x": torch.ones(16, 3)}
    return trainer(Mean(), data, config=config, run=run, loggers=[], show_progress=False).fit(resume)


@pytest.fixture
def living(tmp_path: Path) -> Any:
    """A training in tmp_path/run that goes on and on."""
    (pid,) = spawn(lambda: train(tmp_path / "run", 10**7))
    wait_for(tmp_path / "run" / "checkpoints" / "last")
    yield pid
    kill([pid])
    reap([pid])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_second_training_is_refused_and_leaves_the_first_alone(tmp_path: Path, living: int, ranks: int) -> None:
    assert run_ranks(lambda: train(tmp_path / "run"), ranks) == [DirectoryInUseError.exit_code] * ranks
    with pytest.raises(DirectoryInUseError, match=f"process {living} on"):
        train(tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["pid"]) == ("running", living)
    os.kill(living, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_reading_commands_work_while_a_training_writes(tmp_path: Path, living: int) -> None:
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert listed.exit_code == 0
    assert "running" in listed.output
    written = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")])
    assert written.exit_code == 0, written.exception
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load("last").step > 0


def test_a_killed_training_is_taken_up_at_once_though_its_data_workers_live(tmp_path: Path) -> None:
    (pid,) = spawn(lambda: train(tmp_path / "run", 10**7, num_workers=2))
    wait_for(tmp_path / "run" / "checkpoints" / "last")
    kill([pid])
    reap([pid])
    step = CheckpointStore(tmp_path / "run" / "checkpoints").load("last").step
    assert train(tmp_path / "run", step + 3).steps == step + 3


def test_a_training_may_follow_another_in_one_process_even_after_an_error(tmp_path: Path) -> None:
    class Failing(Trainer):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        train(tmp_path / "run", trainer=Failing)
    assert train(tmp_path / "run").steps == 4


def test_going_back_sets_the_finished_checkpoint_aside_instead_of_deleting_it(tmp_path: Path) -> None:
    train(tmp_path / "run", 8, keep_last=9)
    checkpoints = tmp_path / "run" / "checkpoints"
    train(tmp_path / "run", 6, resume=checkpoints / "step-00000004")
    assert CheckpointStore(checkpoints).steps() == [4, 6]
    assert (checkpoints / "old-step-00000008" / "manifest.json").is_file()
