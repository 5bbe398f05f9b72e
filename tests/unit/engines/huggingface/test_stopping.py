"""Signals save and exit with their own code; training short of its length is an error."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from etude.engines.huggingface.checkpoints import saved_in
from etude.errors import Interrupted, ShortRunError
from tests.processes import run_ranks
from tests.unit.engines.huggingface.parts import make, same, weights
from tests.unit.engines.huggingface.test_resume import Evaluated


class SignalAt(TrainerCallback):
    """Sends a signal to this process in the middle of a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_code(number: int, code: int, tmp_path: Path) -> None:
    handler = signal.getsignal(number)
    trainer = make(tmp_path, save_strategy="steps", save_steps=100)
    trainer.add_callback(SignalAt(3, number))
    with pytest.raises(Interrupted) as stopped:
        trainer.train()
    assert stopped.value.code == code
    assert signal.getsignal(number) is handler
    assert [step for step, _ in saved_in(tmp_path)] == [4]
    resumed = make(tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    whole = make(tmp_path / "whole")
    whole.train()
    assert same(weights(resumed), weights(whole))


def test_without_saving_a_signal_saves_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path, save_strategy="no")
    trainer.add_callback(SignalAt(1, signal.SIGTERM))
    with pytest.raises(Interrupted):
        trainer.train()
    assert saved_in(tmp_path) == []


def interrupted_rank(directory: Path) -> None:
    trainer = make(directory, save_strategy="steps", save_steps=100)
    if os.environ["RANK"] == "1":
        trainer.add_callback(SignalAt(2, signal.SIGTERM))
    trainer.train()


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    assert run_ranks(partial(interrupted_rank, tmp_path), 2) == [143, 143]
    assert [step for step, _ in saved_in(tmp_path)] == [3]


class EndsEpoch(TrainerCallback):
    """A callback that ends every epoch at once, so that the length is never reached."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_epoch_stop = True
        return control


def test_training_short_of_its_length_is_an_error(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.add_callback(EndsEpoch())
    with pytest.raises(ShortRunError, match="ended at step 2, before the requested 10 steps"):
        trainer.train()


def test_stopping_early_for_a_reason_is_not(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # A learning rate of nought: no evaluation is better than the first.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.0}
    trainer = make(tmp_path, kind=Evaluated, **options, **best)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert trainer.state.global_step == 3
