from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from etude.errors import CheckpointError
from etude.runs import checkpoint as checkpoint_module
from etude.runs import durable, folder, manifest
from etude.runs.checkpoint import CheckpointStore, read_checkpoint
from etude.runs.manifest import DamagedCheckpointError


def state(step: int) -> dict[str, Any]:
    return {
        "model": {"layer.weight": torch.full((4, 3), float(step)), "layer.bias": torch.zeros(3)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "lr": 1e-3}}, "betas": (0.9, 0.999)},
        "progress": {"step": step, "seconds": float("inf")},
    }


def value_of(tree: dict[str, Any]) -> float:
    return float(tree["model"]["layer.weight"][0, 0])


def test_a_saved_tree_comes_back_with_its_step_metric_and_info(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(
        state(7), step=7, metric=0.25, info={"epoch": 1.5, "nan": float("nan"), "pair": (1, 2)}, wait=True
    )
    loaded = store.load()
    assert (loaded.step, loaded.metric, loaded.path) == (7, 0.25, path)
    assert loaded.info["pair"] == (1, 2)
    assert loaded.info["nan"] != loaded.info["nan"]
    assert value_of(loaded.tree) == 7
    assert loaded.tree["optimizer"]["state"][0]["lr"] == 1e-3
    assert loaded.tree["optimizer"]["betas"] == (0.9, 0.999)
    assert loaded.tree["progress"] == {"step": 7, "seconds": float("inf")}


def test_the_layout_is_one_file_per_part_and_readable_by_the_official_library(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(state(3), step=3, wait=True)
    assert path == tmp_path / "step-00000003"
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert torch.equal(load_file(path / "model.safetensors")["layer.weight"], torch.full((4, 3), 3.0))
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000003"]


def test_training_may_change_the_tensors_as_soon_as_save_returns(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    tree = {"model": {"w": torch.ones(300_000)}, "numbers": {"list": [1, 2]}}
    store.save(tree, step=1)
    tree["model"]["w"].zero_()
    tree["numbers"]["list"].append(3)
    loaded = store.load()
    assert loaded.tree["model"]["w"].min() == 1
    assert loaded.tree["numbers"]["list"] == [1, 2]


def test_a_second_save_waits_for_the_first_and_both_are_right(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=5)
    for step in range(1, 5):
        store.save(state(step), step=step)
    assert store.waited_s > 0
    assert store.blocked_s > 0
    store.wait()
    assert store.steps() == [1, 2, 3, 4]
    for step in store.steps():
        assert value_of(store.load(step).tree) == step


def test_shapes_and_keys_may_change_between_saves(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save({"model": {"w": torch.ones(3)}, "ema": {"w": torch.ones(3)}}, step=1, wait=True)
    store.save({"model": {"w": torch.ones(5, 2)}, "counts": {"n": 1}}, step=2, wait=True)
    loaded = store.load()
    assert set(loaded.tree) == {"model", "counts"}
    assert loaded.tree["model"]["w"].shape == (5, 2)


def test_memory_is_reused_by_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.reserve(state(0))
    before = dict(store._staged)
    store.save(state(1), step=1)
    store.save(state(2), step=2, wait=True)
    assert store._staged == before
    assert value_of(store.load().tree) == 2


def test_an_empty_tree_can_be_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save({}, step=0, wait=True)
    assert store.load().tree == {}


@pytest.mark.parametrize("key", ["../evil", "a/b", "", ".hidden", 3])
def test_top_level_keys_that_cannot_name_a_file_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(CheckpointError, match="top-level key"):
        CheckpointStore(tmp_path).save({key: {"w": torch.ones(1)}}, step=1)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_steps_are_whole_numbers(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="step"):
        CheckpointStore(tmp_path).save({}, step=step)


def test_state_that_cannot_be_saved_raises_at_once_and_the_next_save_works(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"builtins\.bytes"):
        store.save({"callbacks": {"x": b"raw"}}, step=1)
    store.save(state(2), step=2, wait=True)
    assert store.steps() == [2]


def test_tensors_in_info_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="info"):
        CheckpointStore(tmp_path).save({}, step=1, info={"w": torch.ones(1)})


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=2)
    metrics = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.2, 5: None, 6: float("nan"), 7: 0.8}
    for step, metric in metrics.items():
        store.save(state(step), step=step, metric=metric, wait=True)
    assert store.steps() == [2, 4, 6, 7]
    assert store.best == tmp_path / "step-00000002"
    assert store.last == tmp_path / "step-00000007"
    assert os.readlink(tmp_path / "best") == "step-00000002"
    assert os.readlink(tmp_path / "last") == "step-00000007"
    assert store.load("best").step == 2
    assert value_of(store.load(tmp_path / "best").tree) == 2


def test_larger_may_be_better_and_the_earlier_of_equals_is_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, best_mode="max")
    for step, metric in enumerate([0.5, float("-inf"), 0.9, 0.9, 0.1]):
        store.save(state(step), step=step, metric=metric, wait=True)
    assert store.steps() == [2, 4]
    assert store.load("best").step == 2


def test_without_metrics_there_is_no_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=1, wait=True)
    assert store.best is None
    assert not os.path.lexists(tmp_path / "best")
    with pytest.raises(CheckpointError, match="no checkpoint with a metric"):
        store.load("best")


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "absent")
    assert store.steps() == []
    assert store.last is None
    assert not (tmp_path / "absent").exists()
    for which in ("last", 3, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            store.load(which)


def test_a_run_directory_or_a_store_directory_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "run" / "checkpoints").save(state(4), step=4, wait=True)
    elsewhere = CheckpointStore(tmp_path / "other")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", str(tmp_path / "run" / "checkpoints" / "last")):
        assert elsewhere.load(path).step == 4


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=5, metric=1.0, wait=True)
    store.save(state(2), step=5, metric=0.5, wait=True)
    assert sorted(os.listdir(tmp_path)) == ["best", "last", "step-00000005"]
    assert value_of(store.load(5).tree) == 2
    assert store.load("best").metric == 0.5


def test_a_step_saved_again_is_never_without_a_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=5, wait=True)
    seen = []
    rename = os.rename

    def watched(source: Any, target: Any) -> None:
        rename(source, target)
        seen.append(value_of(CheckpointStore(tmp_path).load("last").tree))

    monkeypatch.setattr(durable.os, "rename", watched)
    store.save(state(2), step=5, wait=True)
    assert seen == [2, 2, 2]


def test_a_revision_left_by_a_crash_is_used_and_then_tidied(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=5, wait=True)
    os.rename(tmp_path / "step-00000005", tmp_path / "step-00000005-r1")
    assert value_of(store.load(5).tree) == 1
    store.save(state(2), step=5, wait=True)
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000005"]


def test_when_the_run_goes_back_the_other_future_is_set_aside_and_named(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = CheckpointStore(tmp_path, keep_last=1, on_warning=warnings.append)
    store.save(state(10), step=10, metric=0.1, wait=True)
    store.save(state(20), step=20, wait=True)
    store.save(state(15), step=15, wait=True)
    assert store.steps() == [10, 15]
    assert any("step-00000020" in warning and "went back" in warning for warning in warnings)
    assert store.load().step == 15
    assert value_of(read_checkpoint(tmp_path / "old-step-00000020").tree) == 20
    for step in (20, 15):  # a second time, beside the first
        store.save(state(step), step=step, wait=True)
    assert (tmp_path / "old-step-00000020-1").is_dir()


def test_when_the_run_goes_back_because_of_damage_the_damaged_one_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, on_warning=lambda _: None)
    store.save(state(20), step=20, wait=True)
    (tmp_path / "step-00000020" / "state.json").write_text("{}")
    store.save(state(15), step=15, wait=True)
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000015"]


def test_old_checkpoints_go_only_after_the_new_one_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    store = CheckpointStore(tmp_path, keep_last=1, on_warning=warnings.append)
    store.save(state(1), step=1, wait=True)

    def disk_that_lies(path: Path) -> manifest.Manifest:
        with open(path / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x55")
        return manifest.verify(path)

    monkeypatch.setattr(folder, "verify", disk_that_lies)
    store.save(state(2), step=2)
    with pytest.raises(
        CheckpointError, match=r"step 2 .*model\.safetensors is damaged.*last good one is step-00000001"
    ):
        store.wait()
    monkeypatch.undo()
    assert store.steps() == [1]
    assert value_of(store.load().tree) == 1
    assert len(warnings) == 1


def test_a_failed_save_warns_once_raises_for_who_waits_and_is_then_over(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "file").touch()
    store = CheckpointStore(tmp_path / "file", on_warning=warnings.append)
    store.save(state(1), step=1)
    with pytest.raises(CheckpointError, match="could not be written"):
        store.wait()
    store.wait()
    with pytest.raises(CheckpointError, match="could not be written"):
        store.save(state(1), step=1, wait=True)
    assert len(warnings) == 2


def _rewrite_manifest(path: Path, **changes: Any) -> None:
    body = json.loads((path / "manifest.json").read_bytes())["body"] | changes
    (path / "manifest.json").write_bytes(manifest._seal(body))


def test_a_newer_schema_is_refused_with_a_hint_and_not_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(state(1), step=1, wait=True)
    _rewrite_manifest(store.save(state(2), step=2, wait=True), schema_version=4)
    for which in ("last", 2, tmp_path / "step-00000002"):
        with pytest.raises(CheckpointError, match=r"schema version 4.*reads up to 3; upgrade") as caught:
            store.load(which)
        assert not isinstance(caught.value, DamagedCheckpointError)
    store.save(state(3), step=3, wait=True)
    assert store.steps() == [1, 2, 3]


def test_a_manifest_of_another_step_is_damage(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    os.rename(store.save(state(1), step=1, wait=True), tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="belongs to step 1"):
        store.load(9)


def test_an_older_schema_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    _rewrite_manifest(store.save({"progress": {"step": 1}}, step=1, wait=True), schema_version=1)
    for module in (manifest, checkpoint_module):
        monkeypatch.setattr(module, "SCHEMA_VERSION", 3)
    monkeypatch.setitem(checkpoint_module.MIGRATIONS, 1, lambda tree: {**tree, "one": 1})
    monkeypatch.setitem(checkpoint_module.MIGRATIONS, 2, lambda tree: {**tree, "two": tree["one"] + 1})
    assert store.load().tree == {"progress": {"step": 1}, "one": 1, "two": 2}
    monkeypatch.delitem(checkpoint_module.MIGRATIONS, 2)
    with pytest.raises(CheckpointError, match="no way from version 2 to 3"):
        store.load()


def test_checkpoints_that_list_sha256_hashes_still_load_verified(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(state(4), step=1, wait=True)
    files = {
        file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size_bytes": file.stat().st_size}
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    _rewrite_manifest(path, schema_version=1, files=files)
    assert value_of(store.load().tree) == 4
    damaged = bytearray((path / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its hash differs"):
        store.load(1)


def test_loading_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = CheckpointStore(tmp_path).save({"model": {"weight": torch.arange(3_000_000)}}, step=1, wait=True)
    read_bytes: Counter[str] = Counter()

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            read_bytes[Path(str(self.name)).name] += count
            return count

    monkeypatch.setattr(manifest, "open_regular", Counted)
    tree = read_checkpoint(path).tree
    assert torch.equal(tree["model"]["weight"], torch.arange(3_000_000))
    assert read_bytes["model.safetensors"] == (path / "model.safetensors").stat().st_size


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        CheckpointStore(tmp_path, keep_last=0)


def test_leftovers_of_dead_processes_are_removed_on_open(tmp_path: Path) -> None:
    (tmp_path / ".tmp-00000005-999999999").mkdir()
    CheckpointStore(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_writer_leaves_no_temporary_files_and_runs_in_one_thread(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(3):
        store.save(state(step), step=step)
    store.wait()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert sum(thread.name.startswith("etude-checkpoint") for thread in threading.enumerate()) >= 1
