"""Several ranks: parity with one process, sharding, and what happens when a rank dies, hangs or is told to stop."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.engines.torch import TorchEngine
from etude.errors import RankError
from etude.runs.checkpoint import CheckpointStore
from tests.processes import reap, run_ranks, spawn, wait_for


class Regression(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (policy(batch["x"]) - batch["y"]).square().mean()}


class Blocks(nn.Module):
    """A stack of blocks in a ModuleList, as sharding expects."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh()) for _ in range(2)
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.out(x)
        return out


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True)}


def train(
    run: Any, micro: int, out: Path | None = None, engine: TorchEngine | None = None, norm: bool = False, **options: Any
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    policy = Blocks(norm)
    callbacks = options.pop("callbacks", ())
    settings: dict[str, Any] = {
        "training_steps": 12,
        "batch_size": micro,
        "lr": 1e-2,
        "ema_decay": 0.9,
        "save_every": 5,
    }
    config = TrainingConfiguration(**{**settings, **options})
    trainer = Regression(
        policy, rows(), config=config, run=run, engine=engine or TorchEngine(), loggers=[], callbacks=callbacks,
        show_progress=False,
    )  # fmt: skip
    trainer.fit()
    weights: dict[str, Tensor] = trainer.session.strategy.state_dict()
    if out is not None and trainer.rank == 0:
        save_file({name: value.contiguous() for name, value in weights.items()}, out)
    return weights


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[k] - b[k]).abs().max()) for k in b)


@pytest.mark.parametrize("norm", [False, True])
def test_two_ranks_equal_one_process_of_the_same_global_batch(tmp_path: Path, norm: bool) -> None:
    out = tmp_path / "w.safetensors"
    # A bias before a norm has no gradient but rounding; an optimizer that divides by its size would amplify that.
    options: dict[str, Any] = {"norm": norm, "optimizer": "sgd" if norm else "adamw"}
    assert run_ranks(partial(train, False, 4, out, **options), 2) == [0, 0]
    assert worst(load_file(out), train(False, 8, **options)) < 1e-6


def test_sharded_training_equals_one_process_and_its_checkpoint_loads_there(tmp_path: Path) -> None:
    out, run = tmp_path / "w.safetensors", tmp_path / "run"
    fsdp = TorchEngine(strategy="fsdp")
    assert run_ranks(partial(train, run, 4, out, fsdp), 2) == [0, 0]
    alone = train(tmp_path / "alone", 8)
    assert worst(load_file(out), alone) < 1e-6
    # The sharded run's checkpoint goes on in one process, and one process's checkpoint goes on sharded.
    longer = train(tmp_path / "alone", 8, training_steps=20)
    assert worst(train(run, 8, training_steps=20), longer) < 1e-6
    assert run_ranks(partial(train, tmp_path / "alone", 4, out, fsdp, training_steps=24), 2) == [0, 0]
    assert worst(load_file(out), train(False, 8, training_steps=24)) < 1e-6


class At(Callback):
    """Do something on one rank after one step."""

    def __init__(self, step: int, rank: int, act: Any) -> None:
        self.step, self.rank, self.act = step, rank, act

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step == self.step and trainer.rank == self.rank:
            self.act()


def test_a_dead_rank_ends_the_group_within_seconds_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    codes = run_ranks(partial(train, tmp_path / "run", 4, callbacks=[At(6, 1, die)], training_steps=100_000), 2)
    assert codes == [RankError.exit_code, -signal.SIGKILL]
    assert "rank 1 died in phase" in capfd.readouterr().err


def test_a_hung_rank_ends_the_group_by_name_and_phase(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = partial(
        train,
        tmp_path / "run",
        4,
        callbacks=[At(6, 1, partial(time.sleep, 600))],
        training_steps=100_000,
        hang_timeout_s=2,
    )
    codes = run_ranks(work, 2)
    assert codes == [RankError.exit_code, RankError.exit_code]
    err = capfd.readouterr().err
    assert "rank 1 hangs in phase 'update' at step 5" in err
    assert "time.sleep" in err or "on_step_end" in err  # the stacks say where


def test_an_error_on_one_rank_ends_the_other_and_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise KeyError("a bug on rank 1")

    codes = run_ranks(partial(train, tmp_path / "run", 4, callbacks=[At(6, 1, fail)], training_steps=100_000), 2)
    assert codes == [RankError.exit_code, 1]
    assert "rank 1" in capfd.readouterr().err


def test_sigterm_to_one_rank_saves_and_ends_all_with_143(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pids = spawn(partial(train, run, 4, training_steps=100_000, save_every=None), 2)
    wait_for(run / "metrics.jsonl")
    time.sleep(0.3)
    os.kill(pids[1], signal.SIGTERM)
    assert reap(pids, 30) == [143, 143]
    step = CheckpointStore(run / "checkpoints").load("last").step
    assert 0 < step < 100_000


def test_a_nan_on_one_rank_stops_both_and_names_rank_and_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = run_ranks(partial(train_with_nan, tmp_path / "run"), 2)
    assert codes == [5, 5]
    err = capfd.readouterr().err
    assert "rank" in err and "samples [" in err and "loss is nan" in err
    assert "17" in err


def train_with_nan(run: Path) -> None:
    data = rows()
    data["x"][17] = float("nan")
    config = TrainingConfiguration(training_steps=20, batch_size=4)
    Regression(Blocks(), data, config=config, run=run, loggers=[], show_progress=False).fit()
