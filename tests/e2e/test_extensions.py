"""The extensions under examples/: a dataset, a trainer, a loss and an optimizer of one's own, beside a YAML."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import etude.engines.torch
import etude.trainer  # noqa: F401
from etude import Callback
from etude.config.build import build
from etude.config.load import load
from etude.runs.checkpoint import CheckpointStore
from tests.processes import run_ranks

EXPERIMENT = Path(__file__).resolve().parents[2] / "examples" / "extensions" / "experiment.yaml"
SHORT = ["data.params.count=64", "training.duration=2 epochs", "training.save_every=1", "training.log_every=1"]


class Die(Callback):
    """Ends the process without a word after a step."""

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step == 3:
            trainer.session.record.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: Path, *overrides: str, dies: bool = False) -> None:
    trainer = build(load(EXPERIMENT, [*SHORT, "loggers=[]", *overrides]), run=run)
    trainer.show_progress = False
    trainer.callbacks = [*trainer.callbacks, *([Die()] if dies else [])]
    trainer.fit()


def weights(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = CheckpointStore(run / "checkpoints").load().tree["policy"]
    return found


@pytest.mark.slow
def test_etude_train_runs_them_and_writes_the_statistics(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude", "train", str(EXPERIMENT), *SHORT, f"run.root={tmp_path}", "run.name=one"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert rows[-1]["train/seen"] == 128
    assert {"train/grad_norm_encoder", "train/grad_norm_decoder", "train/epoch"} <= set(rows[-1])
    stats = json.loads((tmp_path / "one" / "dataset_stats.json").read_text())
    assert stats["observation.state"]["mean"] == pytest.approx([5.0] * 4, abs=1.5)
    assert rows[-1]["lr/encoder"] == 0.05  # the factory's own
    assert rows[-1]["lr/decoder"] == 0.02


@pytest.mark.slow
def test_a_killed_run_goes_on_and_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    assert run_ranks(lambda: train(tmp_path / "one"), 1) == [0]
    assert run_ranks(lambda: train(tmp_path / "killed", dies=True), 1) == [-signal.SIGKILL]
    assert run_ranks(lambda: train(tmp_path / "killed"), 1) == [0]
    assert run_ranks(lambda: train(tmp_path / "two", "training.batch_size=16"), 2) == [0, 0]
    one, killed, two = (weights(tmp_path / name) for name in ("one", "killed", "two"))
    assert all(torch.equal(one[name], killed[name]) for name in one)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
