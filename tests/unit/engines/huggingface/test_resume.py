"""Resuming is exact at every step: augmentation, dropout, accumulation, epoch edges and the log included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from etude.data.columns import Columns
from etude.data.stream import StreamData
from etude.engines.huggingface import BaseTrainer
from tests.unit.engines.huggingface.parts import ACTPolicy, Noisy, Steady, arguments, make, same, weights
from tests.unit.engines.huggingface.test_accumulation import language_model

STEPS = 10
"""37 samples in batches of 4, two of them a step, two epochs: steps 5 and 10 end an epoch with a short batch."""
SOME = (1, 5, 8)
"""After the first step, at the end of an epoch, and inside the second one."""


def rows(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, without times."""
    return [{k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}
            for row in trainer.state.log_history if "loss" in row]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"fp16": True}, {"lr_scheduler_type": "cosine"}])
@pytest.mark.parametrize("steps", [SOME, pytest.param(range(1, STEPS), marks=pytest.mark.nightly)], ids=["some", "all"])
def test_every_resume_point_is_exact(steps: Sequence[int], options: dict[str, Any], tmp_path: Path) -> None:
    whole = make(tmp_path, save_strategy="steps", save_steps=1, **options)
    whole.train()
    assert whole.state.global_step == STEPS
    exact = 0
    for step in steps if options else range(1, STEPS):
        resumed = make(tmp_path / "elsewhere", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.state.global_step == STEPS
        assert rows(resumed) == rows(whole)
        exact += same(weights(resumed), weights(whole))
    assert exact == (len(steps) if options else STEPS - 1)


@pytest.mark.slow
def test_transformers_alone_does_not_resume_exactly_with_augmentation(tmp_path: Path) -> None:
    def plain(**options: Any) -> Any:
        args = arguments(tmp_path, num_train_epochs=2, remove_unused_columns=False, **options)
        return transformers.Trainer(model=ACTPolicy(), args=args, train_dataset=Noisy())

    whole = plain(save_strategy="steps", save_steps=1)
    whole.train()
    resumed = plain()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert not same(weights(resumed), weights(whole))


def dataset_trainer(directory: Path, **options: Any) -> Any:
    return Steady(model=ACTPolicy(), args=arguments(directory, **options), train_dataset=Noisy())


def stream_trainer(directory: Path, **options: Any) -> Any:
    batches = [dict(batch) for batch in DataLoader(Noisy(augment=False), batch_size=4)]
    loader = StreamData(lambda: iter(batches), batched=True)
    return Steady(model=ACTPolicy(), args=arguments(directory, **options), train_loader=loader)


@pytest.mark.slow
@pytest.mark.parametrize("make_trainer", [dataset_trainer, stream_trainer])
def test_datasets_and_streams_resume_exactly_too(make_trainer: Any, tmp_path: Path) -> None:
    options = {"max_steps": 7, "gradient_accumulation_steps": 3}
    whole = make_trainer(tmp_path, save_strategy="steps", save_steps=1, **options)
    whole.train()
    for step in (1, 2, 5):
        resumed = make_trainer(tmp_path / "elsewhere", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert same(weights(resumed), weights(whole))


@pytest.mark.slow
def test_evaluating_and_saving_change_nothing(tmp_path: Path) -> None:
    quiet = make(tmp_path / "quiet")
    quiet.train()
    busy = make(tmp_path / "busy", save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=3,
                eval_on_start=True, kind=Evaluated)  # fmt: skip
    busy.train()
    assert same(weights(busy), weights(quiet))
    losses = [row["eval_loss"] for row in busy.state.log_history if "eval_loss" in row]
    assert len(losses) == 5, "at the start, every third step, and at the end"
    assert losses[-1] < losses[0]
    assert busy.evaluate()["eval_loss"] == busy.evaluate()["eval_loss"], "a measurement can be repeated"


class Evaluated(Steady):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, eval_loader=DataLoader(Noisy(16), batch_size=4, shuffle=True))


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_train(tmp_path: Path) -> None:
    whole = make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    whole.train()
    again = make(tmp_path, max_steps=2)
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == 2
    assert same(weights(again), weights(whole))


@pytest.mark.slow
def test_steps_and_epochs_are_counted_as_transformers_does(tmp_path: Path) -> None:
    ours = make(tmp_path, num_train_epochs=1, gradient_accumulation_steps=4)
    ours.train()
    args = arguments(tmp_path, num_train_epochs=1, gradient_accumulation_steps=4, per_device_train_batch_size=4,
                     remove_unused_columns=False)  # fmt: skip
    theirs = transformers.Trainer(model=ACTPolicy(), args=args, train_dataset=Noisy())
    theirs.train()
    assert (ours.state.global_step, ours.state.epoch) == (theirs.state.global_step, theirs.state.epoch) == (3, 1.0)
    assert torch.isfinite(torch.cat([value.flatten() for value in weights(ours).values()])).all()


@pytest.mark.slow
def test_a_change_that_makes_the_continuation_differ_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    make(tmp_path, max_steps=2, gradient_accumulation_steps=4).train(str(tmp_path / "checkpoint-1"))
    assert "resuming with global_batch 8 -> 16: training goes on, but not bit for bit" in caplog.text


@pytest.mark.slow
def test_a_model_of_transformers_resumes_exactly_and_loads_from_its_checkpoint(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (32, 8), generator=generator)
    rows = Columns({"input_ids": ids, "labels": ids})

    def trainer(**options: Any) -> BaseTrainer:
        args = arguments(tmp_path, max_steps=6, **options)
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        return BaseTrainer(model=language_model(), args=args, train_loader=loader)

    whole = trainer(save_strategy="steps", save_steps=1)
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(resumed), weights(whole))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert type(loaded) is transformers.LlamaForCausalLM
