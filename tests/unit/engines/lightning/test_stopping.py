"""Signals save and exit with their own code, under Lightning's Trainer as under every other."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
from torch.utils.data import DataLoader

from etude.errors import DataError, Interrupted
from etude.policies.mlp import MLP
from tests.processes import run_ranks
from tests.unit.engines.lightning.parts import MovesModule, Net, Noisy, loader, make, same, weights


class SignalAt(lightning.Callback):
    """Sends a signal to this process in the middle of a batch, or of a validation."""

    def __init__(self, step: int, number: int, validating: bool = False) -> None:
        self.step, self.number, self.validating = step, number, validating

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == self.step and not self.validating:
            os.kill(os.getpid(), self.number)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and self.validating:
            self.validating = False
            os.kill(os.getpid(), self.number)

    def on_predict_batch_end(self, *args: Any) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_code(number: int, code: int, tmp_path: Path) -> None:
    handler = signal.getsignal(number)
    trainer = make(tmp_path, {"every_n_epochs": 10}, callbacks=[SignalAt(8, number)])
    with pytest.raises(Interrupted) as stopped:
        trainer.fit(Net(), loader())
    assert stopped.value.code == code
    assert signal.getsignal(number) is handler
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["interrupted.ckpt"]
    resumed, whole = Net(), Net()
    make(tmp_path).fit(resumed, loader(), ckpt_path=tmp_path / "saved")
    make(tmp_path).fit(whole, loader())
    assert same(weights(resumed), weights(whole))


@pytest.mark.parametrize("where", ["inside an accumulation", "at the end of an epoch", "in a validation"])
def test_wherever_a_signal_comes_the_run_goes_on_exactly(where: str, tmp_path: Path) -> None:
    inside = where == "inside an accumulation"
    options: dict[str, Any] = {"accumulate_grad_batches": 4} if inside else {"val_check_interval": 2}
    step = {"inside an accumulation": 1, "at the end of an epoch": 5, "in a validation": 8}[where]
    validation = None if inside else DataLoader(Noisy(), batch_size=8)
    stop = SignalAt(step, signal.SIGTERM, where == "in a validation")
    with pytest.raises(Interrupted):
        make(tmp_path, {"every_n_epochs": 10}, callbacks=[stop], **options).fit(Net(), loader(), validation)
    resumed, whole = Net(), Net()
    make(tmp_path, **options).fit(resumed, loader(), validation, ckpt_path=tmp_path / "saved" / "interrupted.ckpt")
    make(tmp_path, **options).fit(whole, loader(), validation)
    assert same(weights(resumed), weights(whole))


def test_without_checkpoints_a_signal_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path, callbacks=[SignalAt(1, signal.SIGTERM)]).fit(Net(), loader())
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_prediction_is_stopped_too(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as stopped:
        make(tmp_path, callbacks=[SignalAt(0, signal.SIGTERM)]).predict(Net(), DataLoader(Noisy(), 4))
    assert stopped.value.code == 143


def interrupted_rank(directory: Path) -> None:
    stop = [SignalAt(2, signal.SIGTERM)] if os.environ["RANK"] == "1" else []
    trainer = make(directory, {"every_n_epochs": 10}, callbacks=stop, devices=2, strategy="ddp")
    trainer.fit(Net(), loader())


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    assert run_ranks(partial(interrupted_rank, tmp_path), 2) == [143, 143]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["interrupted.ckpt"]


def test_nothing_to_evaluate_on_is_said(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_epochs=1)
    with pytest.raises(DataError, match=r"nothing to test on: give dataloaders, or a data module with test_dataloader"):
        trainer.test(Net(), datamodule=MovesModule())
    with pytest.raises(DataError, match="nothing to predict on"):
        trainer.predict(Net(), datamodule=MovesModule())
    trainer.limit_test_batches = 0
    assert trainer.test(Net(), datamodule=MovesModule()) == []


def test_validating_before_training_works(tmp_path: Path) -> None:
    policy, trainer = MLP(hidden=[8]), make(tmp_path, max_epochs=1)
    first = trainer.validate(policy, datamodule=MovesModule(), verbose=False)
    trainer.fit(policy, MovesModule())
    assert trainer.validate(policy, datamodule=MovesModule(), verbose=False)[0]["val/loss"] < first[0]["val/loss"]
