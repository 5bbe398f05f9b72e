"""A loss or gradient that is not finite stops before the update, where transformers alone destroys the weights."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from etude.engines.huggingface import BaseTrainer
from etude.errors import ConfigError, NonFiniteError, ShortRunError
from tests.unit.engines.huggingface.parts import ACTPolicy, Noisy, Steady, arguments, make, same, weights

BAD = 11


def test_transformers_alone_loses_the_weights_and_logs_clean_numbers(tmp_path: Path) -> None:
    args = arguments(tmp_path, num_train_epochs=1, logging_steps=1, remove_unused_columns=False)
    trainer = transformers.Trainer(model=ACTPolicy(), args=args, train_dataset=Noisy(bad=BAD))
    trainer.train()
    assert all(torch.isnan(value).all() for value in weights(trainer).values())
    assert all(row["loss"] == row["loss"] for row in trainer.state.log_history if "loss" in row)


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"gradient_accumulation_steps": 1}, {"max_grad_norm": 0.0}])
def test_a_bad_sample_stops_before_the_update(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, bad=BAD, save_strategy="steps", save_steps=1, **options)
    with pytest.raises(NonFiniteError) as stopped:
        trainer.train()
    message = str(stopped.value)
    found = re.fullmatch(r"step (\d+), rank 0: loss is nan in micro-batch \d; samples \[(.*)\]\. .*", message)
    assert found, message
    samples = [int(number) for number in found[2].split(", ")]
    assert BAD in samples and len(samples) == 4, "only the micro-batch at fault is named"
    step = int(found[1])
    assert step == trainer.state.global_step
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())
    good = ACTPolicy.from_pretrained(tmp_path / f"checkpoint-{step}") if step else ACTPolicy()
    assert same(dict(good.state_dict()), weights(trainer)), "the weights are those of the last good step"


class Steep(BaseTrainer):
    """A finite loss with an infinite gradient."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return (model(**inputs)["loss"] * 0).sqrt()


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_bad_gradient_stops_before_the_update(max_grad_norm: float, tmp_path: Path) -> None:
    trainer = make(tmp_path, kind=Steep, max_grad_norm=max_grad_norm)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"step 0, rank 0: gradient not finite in net\.0\.weight, .*; samples \["):
        trainer.train()
    assert same(weights(trainer), before)


class Overflowing(Steady):
    """Gradients that overflow at a large loss scale and not at a small one, or at every scale."""

    limit = 1000.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        loss = super().compute_loss(model, inputs)
        if self.accelerator.scaler.get_scale() > self.limit:
            loss = loss + (loss * 0).sqrt()
        return loss


def test_half_precision_lowers_its_scale_before_it_gives_up(tmp_path: Path) -> None:
    trainer = make(tmp_path, kind=Overflowing, fp16=True, num_train_epochs=3)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() < Overflowing.limit
    assert not same(weights(trainer), dict(ACTPolicy().state_dict()))
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_half_precision_gives_up_when_the_numbers_are_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Overflowing, "limit", 0.0)
    trainer = make(tmp_path, kind=Overflowing, fp16=True, num_train_epochs=10)
    with pytest.raises(NonFiniteError, match="gradient not finite"):
        trainer.train()
    assert same(weights(trainer), dict(ACTPolicy().state_dict()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ignore_data_skip": True}, "skips no data"),
        ({"enable_jit_checkpoint": True}, "SIGTERM saves"),
        ({"optim": "lomo"}, "nothing can be checked"),
        ({"auto_find_batch_size": True}, "ready-made train_loader"),
    ],
)
def test_options_that_would_break_a_promise_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **options)


def test_a_loader_and_a_dataset_are_one_too_many(tmp_path: Path) -> None:
    loader = DataLoader(Noisy(), batch_size=4)
    with pytest.raises(ConfigError, match="not both"):
        Steady(model=ACTPolicy(), args=arguments(tmp_path), train_loader=loader, train_dataset=Noisy())
    with pytest.raises(ConfigError, match="nothing to train on"):
        Steady(model=ACTPolicy(), args=arguments(tmp_path)).train()


def test_weights_that_an_update_has_broken_are_not_saved(tmp_path: Path) -> None:
    class Breaking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                next(model.parameters()).data.fill_(float("nan"))

    trainer = make(tmp_path, max_steps=6, save_strategy="steps", save_steps=1)
    trainer.add_callback(Breaking())
    with pytest.raises(NonFiniteError, match=r"step 3: weights or buffers not finite in .* the last good checkpoint"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_callback_that_exits_is_a_short_run(tmp_path: Path) -> None:
    class Leaving(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            sys.exit(0)

    trainer = make(tmp_path, max_steps=3)
    trainer.add_callback(Leaving())
    with pytest.raises(ShortRunError, match=r"ended at step 1, before the requested 3 steps: .* sys.exit\(0\)"):
        trainer.train()
