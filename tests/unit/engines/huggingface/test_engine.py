"""The engine: transformers drives, Etude steps; numbers, files and errors are those of the torch engine."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude import Loss, Trainer, TrainingConfiguration
from etude.callbacks import Callback
from etude.engines.huggingface import HuggingFaceEngine
from etude.errors import ConfigError, Interrupted, NonFiniteError
from etude.runs.checkpoint import CheckpointStore
from etude.runs.directory import Run
from etude.runs.metrics import read_metrics
from tests.crash.harness import compare
from tests.processes import kill, reap, run_ranks, spawn, wait_for_step
from tests.unit.engines.huggingface.parts import Noisy
from tests.unit.test_trainer import ManualTrainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Own(Trainer):
    """A trainer with a loss of its own, and unequal weights."""

    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Loss:
        error = (policy(batch["x"]) - batch["y"]).square().squeeze(1)
        return Loss((error * batch["x"][:, 0].exp()).sum(), batch["x"][:, 0].exp().sum(), {"worst": error.max()})


CONFIG = {
    "lr": 1e-2, "batch_size": 4, "gradient_accumulation_steps": 2, "training_steps": 50, "schedule": "cosine",
    "warmup_steps": 5, "clip_norm": 0.5, "ema_decay": 0.9, "log_every": 7, "evaluate_every": 20, "save_every": 9,
    "seed": 3,
}  # fmt: skip


def fit(
    engine: Any, directory: Path | None, data: Any = None, callbacks: Sequence[Callback] = (), **config: Any
) -> Trainer:
    torch.set_num_threads(1)
    trainer = Own(
        Net(), data or Noisy(), engine=engine, config=TrainingConfiguration(**{**CONFIG, **config}),
        eval_data=Noisy(11), run=directory or False, loggers=[], show_progress=False,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit()
    return trainer


@pytest.mark.slow
def test_fifty_steps_are_those_of_the_torch_engine_bit_for_bit(tmp_path: Path) -> None:
    fit("torch", tmp_path / "torch")
    fit(HuggingFaceEngine(), tmp_path / "hf")
    assert compare(tmp_path / "hf", tmp_path / "torch") is None
    assert CheckpointStore(tmp_path / "hf/checkpoints").load("last").step == 50
    assert Run(tmp_path / "hf").status()["state"] == "finished"
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == sorted(p.name for p in (tmp_path / "torch").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("duration", ["2 epochs", "300 tokens"])
def test_any_kind_of_length_is_kept(duration: str) -> None:
    steps = [
        fit(engine, None, duration=duration, schedule="constant").progress.step
        for engine in ("torch", HuggingFaceEngine())
    ]
    assert steps[0] == steps[1] > 0


def run(engine: str, directory: Path) -> None:
    fit(HuggingFaceEngine() if engine == "huggingface" else engine, directory, save_every=2)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])])
def test_every_killed_run_resumes_exactly(tmp_path: Path, kills: int) -> None:
    short: dict[str, Any] = {"save_every": 1, "training_steps": 16}
    fit(HuggingFaceEngine(), tmp_path / "whole", **short)
    draw, exact = random.Random(0), 0
    for trial in range(kills):
        directory = tmp_path / f"trial-{trial}"
        pids = spawn(partial(fit, HuggingFaceEngine(), directory, callbacks=[Slow()], **short))
        wait_for_step(directory / "checkpoints", draw.randint(1, 8))
        time.sleep(draw.random() * 0.02)  # anywhere in a save
        kill(pids)
        assert reap(pids) == [-signal.SIGKILL]
        fit(HuggingFaceEngine(), directory, **short)
        exact += compare(directory, tmp_path / "whole") is None
    assert exact == kills


class Slow(Callback):
    """Leaves time to be killed in."""

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step > 8:
            time.sleep(1.0)


@pytest.mark.slow
def test_a_run_changes_engines_in_the_middle(tmp_path: Path) -> None:
    """Under a constant rate, which does not depend on the length, so that the first part can be a shorter run."""
    fit("torch", tmp_path / "whole", schedule="constant")
    fit(HuggingFaceEngine(), tmp_path / "mixed", schedule="constant", training_steps=27)
    fit("torch", tmp_path / "mixed", schedule="constant")
    mixed, whole = (CheckpointStore(tmp_path / name / "checkpoints").load("last") for name in ("mixed", "whole"))
    assert mixed.step == whole.step == 50
    for part in ("policy", "ema"):
        assert all(torch.equal(mixed.tree[part][name], value) for name, value in whole.tree[part].items())


@pytest.mark.slow
def test_two_ranks_are_those_of_the_torch_engine(tmp_path: Path) -> None:
    for engine in ("torch", "huggingface"):
        assert run_ranks(partial(run, engine, tmp_path / engine), 2) == [0, 0]
    assert compare(tmp_path / "huggingface", tmp_path / "torch") is None


def test_a_bad_sample_stops_before_the_update(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"samples \[.*11.*\]"):
        fit(HuggingFaceEngine(), tmp_path, data=Noisy(bad=11))
    status = Run(tmp_path).status()
    assert status["state"] == "failed"
    assert "NonFiniteError" in status["error"]


def test_a_signal_saves_and_stops(tmp_path: Path) -> None:
    class Asks(Callback):
        def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
            if trainer.progress.step == 4:
                signal.raise_signal(signal.SIGTERM)

    trainer = Own(
        Net(), Noisy(), engine=HuggingFaceEngine(), config=TrainingConfiguration(**CONFIG), run=tmp_path, loggers=[],
        callbacks=[Asks()], show_progress=False,
    )  # fmt: skip
    with pytest.raises(Interrupted):
        trainer.fit()
    assert CheckpointStore(tmp_path / "checkpoints").load("last").step == 5


def test_trainers_with_their_own_step_run_too() -> None:
    found = []
    for engine in ("torch", HuggingFaceEngine()):
        policy = Net()
        config = TrainingConfiguration(training_steps=5, batch_size=4)
        ManualTrainer(policy, Noisy(), engine=engine, config=config, run=False, show_progress=False).fit()
        found.append(policy.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
def test_reports_of_transformers_get_the_rows_of_the_log(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(HuggingFaceEngine(report_to="tensorboard"), tmp_path)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    seen = [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars("train/loss")]
    assert seen == [(row["step"], row["train/loss"]) for row in read_metrics(tmp_path / "metrics.jsonl")
                    if "train/loss" in row]  # fmt: skip
    assert len(accumulator.Scalars("eval/loss")) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repport_to": "wandb"}, "has no option 'repport_to'; did you mean 'report_to'?"),
        ({"learning_rate": 1e-3}, "'learning_rate' is not set here but by training.lr"),
        ({"bf16": True}, "training.precision: bf16"),
        ({"label_smoothing_factor": 0.1}, "has no effect where Etude makes the step"),
    ],
)
def test_options_are_checked_against_training_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        HuggingFaceEngine(**options)
    assert message in str(refused.value)


def test_a_value_that_transformers_refuses_is_told_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="engine huggingface: nothing is not supported, only"):
        fit(HuggingFaceEngine(report_to="nothing"), None)


def test_every_option_named_is_one_of_training_arguments() -> None:
    import inspect

    from transformers import TrainingArguments

    from etude.engines.huggingface.options import OWNED, PASSED

    known = set(inspect.signature(TrainingArguments).parameters)
    assert PASSED | set(OWNED) <= known
    assert not PASSED & set(OWNED)


def test_a_policy_that_cannot_checkpoint_its_activations_says_so() -> None:
    with pytest.raises(ConfigError, match="Net has no gradient_checkpointing_enable"):
        fit(HuggingFaceEngine(gradient_checkpointing=True), None)


YAML = """
policy: {type: mlp, params: {hidden: [16], dropout: 0.1}}
data: digits
training: {training_steps: 6, batch_size: 8, log_every: 2}
loggers: []
"""


@pytest.mark.slow
def test_the_command_line_runs_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from etude.cli.main import app

    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(YAML)
    for engine in ("torch", "huggingface"):
        done = CliRunner().invoke(app, ["train", "x.yaml", f"engine.type={engine}", f"run.name={engine}"])
        assert done.exit_code == 0, done.output
    found = [CheckpointStore(Path("runs") / name / "checkpoints").load("last").tree["policy"]
             for name in ("torch", "huggingface")]  # fmt: skip
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    for option, message in (("learning_rat", "learning_rate"), ("learning_rate", "training.lr")):
        words = ["train", "x.yaml", "engine.type=huggingface", f"engine.params.{option}=0.1", "run.name=bad"]
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, ConfigError)
        assert message in str(error)


@pytest.mark.slow
def test_checking_a_config_finds_unknown_options_without_transformers(tmp_path: Path) -> None:
    """In a process of its own, where nothing has been imported yet."""
    import subprocess
    import sys

    path = tmp_path / "x.yaml"
    path.write_text(YAML + "engine: {type: huggingface, params: {repport_to: wandb}}\n")
    program = "import sys; from etude.cli.main import main; sys.argv = ['etude', 'check', sys.argv[1]]\n"
    program += "try: main()\nfinally: print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2
    assert "did you mean 'report_to'?" in done.stdout + done.stderr
    assert done.stdout.endswith("False\n")
