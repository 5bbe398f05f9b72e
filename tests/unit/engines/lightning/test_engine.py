"""The Lightning engine: Lightning's loop, and the torch engine's numbers bit for bit."""

from __future__ import annotations

import inspect
import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from etude import Callback, Result, Trainer, TrainingConfiguration
from etude.config.build import build
from etude.config.load import load
from etude.engines.lightning import LightningEngine
from etude.engines.lightning.engine import CONFLICTS
from etude.errors import ConfigError, NonFiniteError
from etude.runs.checkpoint import CheckpointStore
from etude.runs.metrics import read_metrics
from tests.crash.workload import Net, Noisy, WeightedTrainer
from tests.processes import kill, reap, run_ranks, spawn, wait_for_step


def make(run: Any, engine: Any, steps: int = 50, kind: type[Trainer] = WeightedTrainer, **options: Any) -> Trainer:
    parts = {key: options.pop(key) for key in ("callbacks", "loggers") if key in options}
    settings: dict[str, Any] = {
        "training_steps": steps, "batch_size": 4, "gradient_accumulation_steps": 2, "lr": 1e-2, "schedule": "cosine",
        "warmup_steps": 5, "clip_norm": 0.5, "ema_decay": 0.9, "log_every": 7, "save_every": 10, "evaluate_every": 20,
        "device": "cpu", "seed": 3,
    }  # fmt: skip
    config = TrainingConfiguration(**{**settings, **options})
    return kind(
        Net(dropout=True), Noisy(37, augment=True), engine=engine, config=config, run=run, show_progress=False,
        eval_data=Noisy(11, augment=False), **{"loggers": [], **parts},
    )  # fmt: skip


def tree(run: Path) -> dict[str, Any]:
    """Return all that a run saved, less the times it took."""
    found = CheckpointStore(run / "checkpoints").load("last").tree
    found["session"]["progress"].pop("seconds")
    metrics = found["session"]["metrics"]
    found["session"]["metrics"] = {name: value for name, value in metrics.items() if not name.startswith("time/")}
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, less the times."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
def test_fifty_steps_are_the_torch_engines_bit_for_bit(tmp_path: Path) -> None:
    results: list[Result] = [make(tmp_path / engine, engine).fit() for engine in ("torch", "lightning")]
    assert equal(tree(tmp_path / "torch"), tree(tmp_path / "lightning"))
    assert rows(tmp_path / "torch") == rows(tmp_path / "lightning")
    assert results[0].steps == results[1].steps == 50 and results[1].stopped == "finished"
    assert results[1].last is not None and results[1].best is not None
    names = [{path.name for path in (tmp_path / engine).iterdir()} for engine in ("torch", "lightning")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_ten_of_ten_killed_runs_resume_bit_for_bit_and_on_either_engine(tmp_path: Path) -> None:
    make(tmp_path / "whole", "torch", 16, save_every=1).fit()
    draw, exact = random.Random(0), 0
    for trial in range(10):
        run = tmp_path / str(trial)
        (pid,) = spawn(lambda run=run: make(run, "lightning", 16, callbacks=[Slow()], save_every=1).fit())  # type: ignore[misc]
        wait_for_step(run / "checkpoints", draw.randint(1, 8))
        time.sleep(draw.random() * 0.02)  # anywhere in a save
        kill([pid])
        assert reap([pid]) == [-signal.SIGKILL]
        result = make(run, "torch" if trial == 0 else "lightning", 16, save_every=1).fit()
        assert result.steps == 16
        exact += equal(tree(tmp_path / "whole"), tree(run))
    assert exact == 10


class Slow(Callback):
    """Leave time to be killed in."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step > 8:
            time.sleep(self.seconds)


@pytest.mark.slow
def test_two_ranks_are_the_torch_engines_too(tmp_path: Path) -> None:
    for engine in ("torch", "lightning"):
        assert run_ranks(lambda engine=engine: make(tmp_path / engine, engine, 10).fit(), 2) == [0, 0]  # type: ignore[misc]
    assert equal(tree(tmp_path / "torch"), tree(tmp_path / "lightning"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_its_own_code(tmp_path: Path, number: int) -> None:
    run = tmp_path / "run"
    (pid,) = spawn(lambda: make(run, "lightning", 5000, callbacks=[Slow(0.05)], save_every=10).fit())
    wait_for_step(run / "checkpoints", 20)
    os.kill(pid, number)
    assert reap([pid]) == [128 + number]
    assert CheckpointStore(run / "checkpoints").steps()[-1] > 20


@pytest.mark.slow
def test_nan_stops_before_the_update(tmp_path: Path) -> None:
    class Bad(WeightedTrainer):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            loss = super().compute_loss(policy, batch)
            return loss.total * float("nan") if self.progress.step == 4 else loss

    trainer = make(tmp_path / "run", "lightning", kind=Bad)
    with pytest.raises(NonFiniteError, match="step 4, rank 0: loss is nan"):
        trainer.fit()
    assert all(bool(value.isfinite().all()) for value in trainer.policy.state_dict().values())


@pytest.mark.slow
def test_callbacks_loggers_and_profilers_of_lightning_take_part(tmp_path: Path) -> None:
    steps: list[int] = []

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append(trainer.global_step)
            assert pl_module.session.progress.step == trainer.global_step

    engine = LightningEngine(callbacks=[Watch()], logger=CSVLogger(tmp_path / "csv"), profiler="simple")
    make(tmp_path / "run", engine, 20).fit()
    assert steps == list(range(1, 21))
    assert "train/loss" in next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    make(tmp_path / "run", LightningEngine(callbacks=[Watch()]), 25).fit()
    assert steps[20:] == list(range(21, 26))


def test_a_profile_that_was_asked_for_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = logging.getLogger("lightning.pytorch.profilers.profiler")
    said.addHandler(caplog.handler)  # Lightning's loggers may not hand on to the root
    try:
        make(tmp_path / "run", LightningEngine(profiler="simple"), 3).fit()
    finally:
        said.removeHandler(caplog.handler)
    assert "FIT Profiler Report" in caplog.text and "run_training_batch" in caplog.text


@pytest.mark.slow
def test_a_callback_of_lightning_may_end_the_run(tmp_path: Path) -> None:
    class Enough(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.should_stop = trainer.global_step >= 12

    result = make(tmp_path / "run", LightningEngine(callbacks=[Enough()])).fit()
    assert result.steps == 12 and result.stopped == "stopped by a Lightning callback"
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load("last").step == 12


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"profilr": "simple"},
            "engine.params.profilr: lightning.Trainer has no such parameter; did you mean 'profiler'",
        ),
        ({"max_steps": 3}, "engine.params.max_steps cannot be set: training.training_steps"),
        ({"precision": 16}, "engine.params.precision cannot be set: training.precision"),
        ({"strategy": "ddp"}, "start several processes with torchrun"),
        ({"logger": True}, "for Etude's own use the loggers section"),
        ({"profiler": "nothing"}, "engine lightning: .*it can only be one of"),
    ],
)
def test_unknown_and_contradicting_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningEngine(**options)


def test_every_conflict_names_a_real_parameter() -> None:
    assert set(CONFLICTS) <= set(inspect.signature(lightning.Trainer.__init__).parameters)


CONFIG = """
policy: {type: mlp, params: {hidden: [8]}}
data: {type: digits}
engine: {type: torch}
training: {training_steps: 3, batch_size: 8, device: cpu}
loggers: []
"""


@pytest.mark.slow
def test_the_engine_is_chosen_by_configuration(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(CONFIG)
    results = []
    for engine in ("torch", "lightning"):
        loaded = load(path, [f"engine.type={engine}", f"run.root={tmp_path}", f"run.name={engine}"])
        trainer = build(loaded)
        trainer.show_progress = False
        results.append(trainer.fit())
    assert equal(tree(tmp_path / "torch"), tree(tmp_path / "lightning"))
    with pytest.raises(ConfigError, match="did you mean 'profiler'"):
        load(path, ["engine.type=lightning", "engine.params.profilr=simple"])
    with pytest.raises(ConfigError, match=r"training\.training_steps"):
        build(load(path, ["engine.type=lightning", "engine.params.max_steps=3"]))
