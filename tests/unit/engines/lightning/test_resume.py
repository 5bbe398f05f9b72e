"""`fit(ckpt_path=...)` goes on bit for bit, from wherever the checkpoint was written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from etude.engines.lightning import load_checkpoint
from etude.engines.lightning.checkpoint import SafeCheckpointIO
from etude.errors import CheckpointError
from tests.unit.engines.lightning.parts import Module, Net, Noisy, Weights, loader, make, same, saved, weights


class Stream(IterableDataset[dict[str, Tensor]]):
    """Samples that can only be iterated."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Noisy()[index] for index in range(22))


LOADERS: dict[str, Any] = {
    "shuffled": loader,
    "two workers": lambda: loader(num_workers=2),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "two loaders": lambda: {"a": loader(), "b": loader(size=8)},
    "weighted": lambda: DataLoader(Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 22, 20)),
}
EVERY_STEP = {"every_n_train_steps": 1}


def train(root: Path, data: str, save: dict[str, Any], checkpoint: Path | None = None, **options: Any) -> Weights:
    """Train a LightningModule, with the global generators anywhere."""
    module = Module()
    torch.manual_seed(hash(str(checkpoint)) % 1000)
    validation = DataLoader(Noisy(), batch_size=8) if options.pop("validates", False) else None
    trainer = make(root, save, **options)
    trainer.fit(module, LOADERS[data](), validation, ckpt_path=checkpoint)
    assert trainer.global_step == 18 // options.get("accumulate_grad_batches", 1) or "limit_train_batches" in options
    return weights(module)


def count_exact(root: Path, data: str, save: dict[str, Any], points: int, **options: Any) -> tuple[int, int]:
    """Return how many resume points lead to the weights of the run that was never stopped."""
    whole = train(root / "whole", data, save, **options)
    every = saved(root / "whole")
    chosen = every if len(every) <= points else [every[i * len(every) // points] for i in range(points)]
    exact = 0
    for number, checkpoint in enumerate(chosen):
        exact += same(whole, train(root / str(number), data, save, checkpoint, **options))
        shutil.rmtree(root / str(number), ignore_errors=True)
    return exact, len(chosen)


@pytest.mark.slow
def test_nine_resume_points_in_the_middle_of_epochs_are_exact(tmp_path: Path) -> None:
    assert count_exact(tmp_path, "shuffled", EVERY_STEP, 9) == (9, 9)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["two workers", "stream", "two loaders"])
def test_ready_made_loaders_of_any_kind_resume_exactly(tmp_path: Path, data: str) -> None:
    exact, points = count_exact(tmp_path, data, EVERY_STEP, 4)
    assert exact == points == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "save, options",
    [
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"validates": True}),
        ({}, {"validates": True, "val_check_interval": 2}),
        ({}, {"validates": True, "val_check_interval": 3, "check_val_every_n_epoch": None}),
        (EVERY_STEP, {"limit_train_batches": 3}),
        (EVERY_STEP, {"accumulate_grad_batches": 3}),
    ],
)
def test_checkpoints_of_every_cadence_resume_exactly(
    tmp_path: Path, save: dict[str, Any], options: dict[str, Any]
) -> None:
    exact, points = count_exact(tmp_path, "shuffled", save, 3, **options)
    assert exact == points == 3


@pytest.mark.slow
def test_a_checkpoint_inside_an_accumulation_keeps_its_gradients(tmp_path: Path) -> None:
    options = {"validates": True, "accumulate_grad_batches": 3, "val_check_interval": 2}
    exact, points = count_exact(tmp_path, "shuffled", {}, 6, **options)
    assert exact == points >= 3


@pytest.mark.slow
def test_a_plain_policy_resumes_from_the_directory_of_checkpoints(tmp_path: Path) -> None:
    whole = Net()
    make(tmp_path / "a", {"every_n_train_steps": 5}).fit(whole, loader())
    resumed = Net()
    make(tmp_path / "b").fit(resumed, loader(), ckpt_path=tmp_path / "a" / "saved")
    assert same(weights(whole), weights(resumed))


@pytest.mark.slow
def test_the_seed_decides_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for seed in (1, 1, 2):
        policy = Net()
        make(tmp_path / str(len(found)), EVERY_STEP, seed=seed, max_epochs=1).fit(policy, loader())
        found.append(weights(policy))
    assert same(found[0], found[1]) and not same(found[0], found[2])
    half = tmp_path / "2" / "saved" / "epoch=0-step=3.ckpt"
    policy = Net()
    make(tmp_path / "r", max_epochs=1).fit(policy, loader(), ckpt_path=half)
    assert same(found[2], weights(policy))
    make(tmp_path / "s", max_epochs=1, seed=9).fit(Net(), loader(), ckpt_path=half)
    assert "resuming with seed 9 instead of 2" in caplog.text
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    policy = Net()
    make(tmp_path / "e", max_epochs=1).fit(policy, loader())
    assert same(found[2], weights(policy))


def test_a_run_that_drew_in_another_way_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, EVERY_STEP, max_steps=3, max_epochs=-1).fit(Net(), loader())
    (*_, newest) = saved(tmp_path)
    before = load_checkpoint(newest)
    del before["etude"]["draws"]  # as checkpoints were
    SafeCheckpointIO().save_checkpoint(before, tmp_path / "before.ckpt")
    policy = Net()
    trainer = make(tmp_path, max_steps=6, max_epochs=-1)
    trainer.fit(policy, loader(), ckpt_path=tmp_path / "before.ckpt")
    assert trainer.global_step == 6 and all(bool(value.isfinite().all()) for value in policy.parameters())
    assert caplog.text.count("drew dropout and augmentation by epoch and batch") == 1
    make(tmp_path, max_steps=6, max_epochs=-1).fit(Net(), loader(), ckpt_path=newest)
    assert caplog.text.count("drew dropout and augmentation by epoch and batch") == 1


@pytest.mark.slow
def test_validation_does_not_disturb_training(tmp_path: Path) -> None:
    alone = train(tmp_path / "a", "shuffled", EVERY_STEP)
    validated = train(tmp_path / "b", "shuffled", EVERY_STEP, validates=True, val_check_interval=2)
    assert same(alone, validated)


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [{"val_check_interval": 2}, {}, {"check_val_every_n_epoch": None, "val_check_interval": 9}]
)
def test_a_validation_that_a_crash_came_before_is_made_up_for(tmp_path: Path, when: dict[str, Any]) -> None:
    class Watch(lightning.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            stepped = trainer.fit_loop.epoch_loop._batches_that_stepped  # what loggers are told
            self.seen.append(
                (trainer.global_step, stepped, trainer.current_epoch, float(trainer.logged_metrics["val"]))
            )

    held_out: Any = [Noisy()[index] for index in range(22)]

    def fit(root: Path, checkpoint: Path | None = None) -> list[Any]:
        watch = Watch()
        trainer = make(root, {"every_n_train_steps": 3}, callbacks=[watch], **when)
        trainer.fit(Module(), loader(), DataLoader(held_out, batch_size=8), ckpt_path=checkpoint)
        assert trainer.global_step == 18
        return watch.seen

    whole = fit(tmp_path / "whole")
    for checkpoint in saved(tmp_path / "whole"):
        step = int(checkpoint.stem.rpartition("=")[2])
        if step in (6, 9, 18):
            assert fit(tmp_path / str(step), checkpoint) == [row for row in whole if row[0] >= step], step


@pytest.mark.parametrize("data", ["shuffled", "stream"])
@pytest.mark.parametrize("save", [{"every_n_epochs": 1}, {"save_last": True, "save_top_k": 0}, EVERY_STEP])
def test_a_run_that_ended_inside_an_epoch_is_extended_exactly(tmp_path: Path, data: str, save: dict[str, Any]) -> None:
    whole, half = Module(), Module()
    make(tmp_path / "whole", max_epochs=3).fit(whole, LOADERS[data]())
    make(tmp_path / "half", save, max_epochs=-1, max_steps=8).fit(half, LOADERS[data]())
    extended = Module()
    trainer = make(tmp_path / "half", max_epochs=3)
    trainer.fit(extended, LOADERS[data](), ckpt_path=tmp_path / "half" / "saved")
    assert trainer.global_step == 18
    assert same(weights(whole), weights(extended))


def test_a_run_that_a_callback_stopped_inside_an_epoch_goes_on_exactly(tmp_path: Path) -> None:
    class StopAt(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    whole, half, rest = Module(), Module(), Module()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3}
    make(tmp_path, **options).fit(whole, loader())
    make(tmp_path, {"every_n_epochs": 1}, callbacks=[StopAt()], min_epochs=0, **options).fit(half, loader())
    make(tmp_path, **options).fit(rest, loader(), ckpt_path=tmp_path / "saved")
    assert same(weights(whole), weights(rest))


def test_a_finished_run_is_extended_by_epochs_exactly(tmp_path: Path) -> None:
    whole, half, rest = Net(), Net(), Net()
    make(tmp_path, max_epochs=3).fit(whole, loader())
    make(tmp_path, {"every_n_epochs": 1}, max_epochs=2).fit(half, loader())
    make(tmp_path, max_epochs=3).fit(rest, loader(), ckpt_path=tmp_path / "saved")
    assert same(weights(whole), weights(rest))


def test_the_newest_checkpoint_of_a_version_is_found(tmp_path: Path) -> None:
    options: dict[str, Any] = {"logger": None, "enable_checkpointing": True, "max_epochs": 2}
    for _ in range(2):
        make(tmp_path, **options).fit(Net(), loader())
    rest, whole = Net(), Net()
    trainer = make(tmp_path, max_epochs=3)
    trainer.fit(rest, loader(), ckpt_path=str(tmp_path / "lightning_logs" / "version_0"))
    make(tmp_path, max_epochs=3).fit(whole, loader())
    assert same(weights(rest), weights(whole))
    with pytest.raises(CheckpointError, match=r"holds several runs; name one of them, such as .*version_1"):
        make(tmp_path).fit(Net(), loader(), ckpt_path=tmp_path / "lightning_logs")


def test_a_second_fit_goes_on_inside_the_epoch(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((trainer.fit_loop.epoch_progress.current.processed, batch_idx))

    trainer, policy = make(tmp_path, max_epochs=-1, max_steps=4, callbacks=[Watch()]), Net()
    trainer.fit(policy, loader())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(policy, loader())
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0), (1, 1)]
