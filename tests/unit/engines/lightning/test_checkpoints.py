"""Checkpoints of the Lightning door: whole or absent, verified, never executed, with an older one to fall back on."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from etude.engines.lightning import load_checkpoint
from etude.engines.lightning.checkpoint import SafeCheckpointIO
from etude.errors import CheckpointError, DirectoryInUseError
from etude.runs.lock import DirectoryLock
from tests.processes import kill, reap, spawn, wait_for
from tests.unit.engines.lightning.parts import Module, Net, loader, make, same, saved, weights


def content(step: int) -> dict[str, Any]:
    return {
        "global_step": step,
        "state_dict": {"w": torch.full((3,), float(step))},
        "optimizer_states": [],
        "loops": {},
    }


def write(root: Path, *steps: int) -> list[Path]:
    paths = [root / f"step={step}.ckpt" for step in steps]
    for path, step in zip(paths, steps):
        SafeCheckpointIO().save_checkpoint(content(step), path)
    return paths


def test_what_is_saved_comes_back_as_it_was(tmp_path: Path) -> None:
    rest = {
        "epoch": 1, "callbacks": {"a": {"best": torch.tensor(1.0), "where": Path("x/y"), "wait": timedelta(seconds=3)}},
        "hyper_parameters": {"sizes": (1, 2), "dtype": torch.float16, "names": {"a"}, "table": {1: 2}}, "raw": b"\x00a",
        "array": np.arange(3), "number": np.float64(0.5), "shape": torch.Size([2, 3]), "my key": None,
        "inf": float("inf"),
    }  # fmt: skip
    SafeCheckpointIO().save_checkpoint({**content(4), **rest}, tmp_path / "a.ckpt")
    found = load_checkpoint(tmp_path / "a.ckpt")
    array = found.pop("array")
    assert array.tolist() == [0, 1, 2] and isinstance(array, np.ndarray)
    assert torch.equal(found["state_dict"].pop("w"), torch.full((3,), 4.0))
    del rest["array"]
    assert found == {**content(4), "state_dict": {}, **rest}
    files = {path.suffix for path in (tmp_path / "a.ckpt").iterdir()}
    assert files <= {".json", ".safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_hyperparameters_that_cannot_be_saved_are_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SafeCheckpointIO().save_checkpoint({**content(1), "hyper_parameters": {"net": Net(), "lr": 1}}, tmp_path / "a.ckpt")
    assert load_checkpoint(tmp_path / "a.ckpt")["hyper_parameters"] == {"lr": 1}
    assert "hyper_parameters.net is a Net" in caplog.text


def test_state_that_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"callbacks.mine.*Net"):
        SafeCheckpointIO().save_checkpoint({**content(1), "callbacks": {"mine": Net()}}, tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_used_again_is_never_without_a_good_checkpoint(tmp_path: Path) -> None:
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    for step in (1, 2, 3):
        io.save_checkpoint(content(step), path)
        assert load_checkpoint(path)["global_step"] == step
    path.rename(tmp_path / ".last.ckpt.new")  # where a system without an exchange of names may be caught
    assert load_checkpoint(path)["global_step"] == 3
    io.save_checkpoint(content(4), path)
    assert load_checkpoint(path)["global_step"] == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    io.remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_found_and_an_older_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    _, second, third = write(tmp_path, 1, 2, 3)
    victim = next(second.glob("manifest.json" if "manifest" in damage else "model.safetensors"))
    raw = bytearray(victim.read_bytes())
    raw[-5] ^= 1
    if damage in ("missing", "no manifest"):
        victim.unlink()
    else:
        victim.write_bytes(raw[: len(raw) // 2] if damage == "truncate" else raw)
    # A manifest that cannot be read does not tell how old the checkpoint was: the newest is then the best guess.
    assert load_checkpoint(second)["global_step"] == (3 if "manifest" in damage else 1)
    assert str(second) in caplog.text and "looking for an older checkpoint" in caplog.text
    assert load_checkpoint(third)["global_step"] == 3
    assert load_checkpoint(tmp_path)["global_step"] == 3


def test_without_any_good_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    (only,) = write(tmp_path, 1)
    (only / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded; .*model\.safetensors"):
        load_checkpoint(only)
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "nothing.ckpt")


class Bomb:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_foreign_files_are_read_but_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**content(2), "x": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        load_checkpoint(tmp_path / "bomb.ckpt")
    assert not Path("exploded").exists()
    torch.save(content(2), tmp_path / "plain.ckpt")
    assert load_checkpoint(tmp_path / "plain.ckpt")["global_step"] == 2


@pytest.mark.slow
def test_a_checkpoint_of_lightning_alone_can_be_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Module()
    lightning.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=tmp_path / "theirs")],
    ).fit(module, loader())  # fmt: skip
    (path,) = (tmp_path / "theirs").iterdir()
    resumed = Module()
    make(tmp_path, max_epochs=1).fit(resumed, loader(), ckpt_path=path)
    assert same(weights(module), weights(resumed))
    assert "not written by Etude" in caplog.text


@pytest.mark.slow
def test_ten_of_ten_kills_while_saving_leave_a_usable_checkpoint(tmp_path: Path) -> None:
    """Each child saves at every one of far more steps than it is given time for."""
    draw, usable = random.Random(0), 0
    save = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}
    for trial in range(10):
        root = tmp_path / str(trial)
        (pid,) = spawn(lambda root=root: make(root, save, max_epochs=2000).fit(Net(), loader()))  # type: ignore[misc]
        wait_for(root / "saved" / "last.ckpt")
        time.sleep(draw.random() * 0.1)  # anywhere in a save
        kill([pid])
        assert reap([pid]) == [-signal.SIGKILL]
        good = 0
        for wanted in (root / "saved" / "last.ckpt", root / "saved"):
            steps = load_checkpoint(wanted)["global_step"] + 1
            policy = Net()
            make(tmp_path / "resumed", max_steps=steps, max_epochs=-1).fit(policy, loader(), ckpt_path=wanted)
            whole = Net()
            make(tmp_path / f"whole-{trial}", max_steps=steps, max_epochs=-1).fit(whole, loader())
            good += same(weights(whole), weights(policy))
        usable += good == 2
    assert usable == 10


@pytest.mark.slow
def test_the_last_checkpoint_is_found_by_name(tmp_path: Path) -> None:
    whole = Net()
    make(tmp_path, {"every_n_train_steps": 1, "save_last": True}, max_epochs=2).fit(whole, loader())
    (tmp_path / "saved" / "last.ckpt" / "model.safetensors").write_bytes(b"damaged")
    policy = Net()
    trainer = make(tmp_path, {"every_n_train_steps": 1, "save_last": True}, max_epochs=2)
    trainer.fit(policy, loader(), ckpt_path="last")
    assert same(weights(whole), weights(policy))
    assert len(saved(tmp_path)) >= 12


def test_a_second_training_into_the_same_checkpoints_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, {"every_n_train_steps": 1}, max_steps=2)
    with DirectoryLock(tmp_path / "saved"), pytest.raises(DirectoryInUseError, match=f"process {os.getpid()} "):
        trainer.fit(Net(), loader())
    assert not list((tmp_path / "saved").glob("*.ckpt"))
    make(tmp_path, {"every_n_train_steps": 1}, max_steps=2).fit(Net(), loader())
    assert not (tmp_path / "saved" / ".lock").exists()


def test_data_that_changed_since_a_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, {"every_n_train_steps": 1}, max_steps=2).fit(Net(), loader())
    make(tmp_path, max_steps=3).fit(Net(), loader(), ckpt_path=tmp_path / "saved")
    assert "changed since" not in caplog.text
    make(tmp_path, max_steps=3).fit(Net(), loader(samples=21), ckpt_path=tmp_path / "saved")
    assert "changed since the last session: the data has 21 samples instead of 22" in caplog.text
