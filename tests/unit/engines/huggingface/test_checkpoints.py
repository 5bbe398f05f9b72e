"""Checkpoints are whole or absent, in transformers' layout, without pickle; a damaged one is passed over, loudly."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from etude.engines.huggingface.checkpoints import choose_kept, newest_good
from etude.errors import CheckpointError, DirectoryInUseError
from etude.runs import folder
from etude.runs.checkpoint import read_checkpoint
from etude.runs.lock import DirectoryLock
from tests.processes import kill, reap, spawn, wait_for_step
from tests.unit.engines.huggingface.parts import ACTPolicy, Steady, make, same, weights


def trained(directory: Path, **options: Any) -> Any:
    trainer = make(directory, max_steps=3, save_strategy="steps", save_steps=1, **options)
    trainer.train()
    return trainer


def test_the_layout_is_that_of_transformers_without_pickles(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    newest = tmp_path / "checkpoint-3"
    assert {path.name for path in newest.iterdir()} == {
        "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json", "trainer_state.json",
        "training_args.json",
    }  # fmt: skip
    assert TrainerState.load_from_json(str(newest / "trainer_state.json")).global_step == 3
    assert same(load_file(newest / "model.safetensors"), weights(trainer))
    assert same(dict(ACTPolicy.from_pretrained(newest).state_dict()), weights(trainer))
    assert json.loads((newest / "training_args.json").read_text())["max_steps"] == 3
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.pt*"))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json",
                                  "trainer_state.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_newest_checkpoint_is_passed_over(
    file: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(tmp_path)
    path = tmp_path / "checkpoint-3" / file
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 4
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    resumed = make(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed), weights(whole))
    assert file in caplog.text
    assert "using checkpoint-2 (step 2) instead" in caplog.text
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_named_checkpoint_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_nothing_to_resume_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_a_model_alone_cannot_be_resumed(tmp_path: Path) -> None:
    trained(tmp_path, save_only_model=True)
    with pytest.raises(CheckpointError, match="holds the model only"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_others_is_not_trusted(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.mark.slow
def test_pickles_beside_a_checkpoint_are_never_read(tmp_path: Path) -> None:
    whole = trained(tmp_path)
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "scaler.pt",
        "pytorch_model.bin",
    ):
        torch.save(Bomb(tmp_path / "canary"), tmp_path / "checkpoint-2" / name)
    resumed = make(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(resumed), weights(whole))
    assert not (tmp_path / "canary").exists()


def test_the_limit_keeps_the_newest_and_the_best() -> None:
    newest_first = [Path(f"checkpoint-{step}") for step in (5, 4, 3, 2, 1)]

    def kept(best: str | None, limit: int | None) -> list[str]:
        return [path.name[-1] for path in choose_kept(newest_first, best, limit)]

    assert kept(None, None) == kept("checkpoint-1", 0) == list("54321")
    assert kept(None, 2) == kept("checkpoint-4", 2) == list("54")
    assert kept("checkpoint-1", 3) == list("541")
    assert kept("checkpoint-2", 1) == list("52")


def test_save_total_limit_is_kept(tmp_path: Path) -> None:
    trained(tmp_path, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.glob("*")) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.slow
def test_the_best_model_is_verified_and_loaded_at_the_end(tmp_path: Path) -> None:
    from tests.unit.engines.huggingface.test_resume import Evaluated

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps"}
    trainer = make(tmp_path, kind=Evaluated, max_steps=6, load_best_model_at_end=True, learning_rate=0.5, **options)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path
    assert same(weights(trainer), load_file(best / "model.safetensors"))
    assert read_checkpoint(best).metric == trainer.state.best_metric


@pytest.mark.slow
def test_a_new_start_does_not_mix_with_an_old_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-2", "mine.txt", "old-checkpoint-1", "old-checkpoint-2", "old-checkpoint-3"]
    assert "renamed that to old-checkpoint-3" in caplog.text


@pytest.mark.slow
def test_weights_that_a_model_saves_differently_are_kept_as_they_are(tmp_path: Path) -> None:
    class Rounded(ACTPolicy):
        def save_pretrained(self, directory: str) -> None:
            half = {name: value.half() for name, value in self.state_dict().items()}
            from safetensors.torch import save_file

            save_file(half, Path(directory) / "model.safetensors")

    whole = make(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    resumed = make(tmp_path, max_steps=3)
    for trainer in (whole, resumed):
        trainer.model.__class__ = Rounded
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(weights(resumed), weights(whole))


def test_a_disk_that_cannot_be_written_stops_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = make(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    monkeypatch.setattr(folder, "publish", full)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written .* No space left"):
        trainer.train()
    assert list(tmp_path.iterdir()) == []


STEADY = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "lr_scheduler_type": "constant"}


def run(directory: Path, steps: int) -> None:
    torch.set_num_threads(1)
    make(directory, max_steps=steps, **STEADY).train()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])])
def test_every_kill_while_saving_leaves_a_usable_checkpoint(tmp_path: Path, kills: int) -> None:
    """Each child saves at every one of far more steps than it is given time for."""
    draw = random.Random(0)
    usable = 0
    for trial in range(kills):
        directory = tmp_path / f"trial-{trial}"
        pids = spawn(partial(run, directory, 10_000))
        wait_for_step(directory, draw.randint(2, 6))
        time.sleep(draw.random() * 0.05)  # anywhere in a save
        kill(pids)
        assert reap(pids) == [-signal.SIGKILL]
        newest = newest_good(directory).step
        resumed = make(directory, max_steps=newest + 1, **STEADY)
        resumed.train(resume_from_checkpoint=True)
        whole = make(tmp_path / f"whole-{trial}", max_steps=newest + 1, **{**STEADY, "save_strategy": "no"})
        whole.train()
        usable += same(weights(resumed), weights(whole))
    assert usable == kills


def test_a_second_training_in_the_output_directory_is_refused(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} "):
        trained(tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))
    trained(tmp_path)


def test_data_and_code_that_changed_since_a_checkpoint_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    make(tmp_path, max_steps=4).train(resume_from_checkpoint=True)
    assert "changed since" not in caplog.text

    class Other(Steady):
        pass

    other = make(tmp_path, Other, max_steps=4)
    other.get_train_dataloader().dataset.x += 1
    other.train(resume_from_checkpoint=True)
    assert "changed since the last session: the code of the trainer (" in caplog.text
    assert "changed since the last session: the data has other content, or another order" in caplog.text
