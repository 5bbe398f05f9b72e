"""What disks, crashes and strangers do to checkpoints: always found, always named, never executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import CheckpointError
from etude.runs import manifest
from etude.runs.checkpoint import CheckpointStore, read_checkpoint
from etude.runs.manifest import DamagedCheckpointError
from tests.processes import kill, reap, spawn

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
BIT_FLIPS = 40


def state(step: int, numel: int = 8) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((numel,), float(step)), "b": torch.tensor(step)},
        "optimizer": {"state": {0: {"exp_avg": torch.full((numel,), -float(step))}}, "lr": 1e-3 * step},
    }


@pytest.fixture
def two_good(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path)
    for step in (10, 20):
        store.save(state(step), step=step, metric=0.5, info={"epoch": 0.1 * step}, wait=True)
    return tmp_path


def assert_previous_is_used(directory: Path, file: str) -> None:
    warnings: list[str] = []
    store = CheckpointStore(directory, on_warning=warnings.append)
    loaded = store.load("last")
    assert loaded.step == 10
    assert torch.equal(loaded.tree["model"]["w"], torch.full((8,), 10.0))
    assert "step-00000020" in warnings[0]
    assert file in warnings[0]
    assert "using step-00000010" in warnings[1]
    with pytest.raises(DamagedCheckpointError, match=file):
        store.load(20)
    with pytest.raises(DamagedCheckpointError, match=file):
        store.load(directory / "step-00000020")


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found_and_the_previous_checkpoint_used(two_good: Path, file: str) -> None:
    path = two_good / "step-00000020" / file
    good = path.read_bytes()
    draw = random.Random(file)
    for bit in draw.sample(range(len(good) * 8), BIT_FLIPS):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        assert_previous_is_used(two_good, file)
    path.write_bytes(good)
    assert CheckpointStore(two_good).load().step == 20


@pytest.mark.slow
def test_no_byte_of_the_manifest_can_change_unseen(two_good: Path) -> None:
    path = two_good / "step-00000020" / "manifest.json"
    good = path.read_bytes()
    draw = random.Random(0)
    for index in range(len(good)):
        bad = bytearray(good)
        bad[index] ^= draw.randrange(1, 256)
        path.write_bytes(bad)
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
            manifest.read_manifest(path.parent)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _take_older(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000010" / path.name, path)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [_truncate, _halve, _empty, _append, Path.unlink, _make_directory, _take_older])
def test_every_other_damage_is_found_too(two_good: Path, file: str, harm: Callable[[Path], None]) -> None:
    harm(two_good / "step-00000020" / file)
    assert_previous_is_used(two_good, file)


def test_swapped_files_are_found(two_good: Path) -> None:
    newest = two_good / "step-00000020"
    os.rename(newest / "model.safetensors", newest / "aside")
    os.rename(newest / "optimizer.safetensors", newest / "model.safetensors")
    os.rename(newest / "aside", newest / "optimizer.safetensors")
    assert_previous_is_used(two_good, "model.safetensors")


def test_swapped_directories_are_found(two_good: Path) -> None:
    os.rename(two_good / "step-00000010", two_good / "aside")
    os.rename(two_good / "step-00000020", two_good / "step-00000010")
    os.rename(two_good / "aside", two_good / "step-00000020")
    with pytest.raises(CheckpointError, match="belongs to step"):
        CheckpointStore(two_good).load()


def test_when_none_is_good_the_error_says_what_is_wrong(two_good: Path) -> None:
    for step in (10, 20):
        _empty(two_good / f"step-000000{step}" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be loaded; .*step-00000010.*model\.safetensors"
    ):
        CheckpointStore(two_good).load()


def test_a_damaged_best_gives_way_to_the_next_best(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = CheckpointStore(tmp_path, keep_last=3, on_warning=warnings.append)
    for step, metric in ((1, 0.3), (2, 0.1), (3, 0.2)):
        store.save(state(step), step=step, metric=metric, wait=True)
    _truncate(tmp_path / "step-00000002" / "state.json")
    assert store.load("best").step == 3
    assert "state.json" in warnings[0]
    _truncate(tmp_path / "step-00000002" / "manifest.json")
    assert store.load("best").step == 3


def test_training_goes_on_after_damage_and_the_damaged_one_is_replaced(two_good: Path) -> None:
    _truncate(two_good / "step-00000020" / "model.safetensors")
    store = CheckpointStore(two_good, keep_last=1)
    assert store.load().step == 10
    store.save(state(15), step=15, wait=True)
    store.save(state(20), step=20, wait=True)
    assert store.load().step == 20
    assert CheckpointStore(two_good).load(20).path.name == "step-00000020"


# Strangers.


class Bomb:
    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self._canary}",))


def _torch_file(canary: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2), "bomb": Bomb(canary)}, buffer)
    return buffer.getvalue()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "a payload was executed"


PAYLOADS = [lambda canary: pickle.dumps(Bomb(canary)), _torch_file]


@pytest.mark.parametrize("make", PAYLOADS, ids=["pickle", "torch.save"])
@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_place_of_a_file_is_refused_even_with_matching_hashes(
    tmp_path: Path, canary: Path, file: str, make: Callable[[Path], bytes]
) -> None:
    path = CheckpointStore(tmp_path / "store").save(state(1), step=1, wait=True)
    (path / file).write_bytes(make(canary))
    for trusted in (False, True):
        if trusted and file != "manifest.json":
            _reseal(path)
        with pytest.raises(CheckpointError, match=file):
            read_checkpoint(path)


def _reseal(path: Path, **extra: manifest.FileRecord) -> None:
    records = {name: manifest.hash_file(path / name) for name in FILES if name != "manifest.json"}
    (path / "manifest.json").write_bytes(manifest.Manifest(1, None, {}, records | extra).dump())


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "x.safetensors", "checkpoint.json", "manifest.json"])
@pytest.mark.parametrize("make", PAYLOADS, ids=["pickle", "torch.save"])
def test_a_foreign_file_or_directory_is_refused(
    tmp_path: Path, canary: Path, name: str, make: Callable[[Path], bytes]
) -> None:
    directory = tmp_path / "foreign" / "step-00000001"
    directory.mkdir(parents=True)
    (directory / name).write_bytes(make(canary))
    store = CheckpointStore(tmp_path / "store")
    for path in (directory, directory / name, directory.parent):
        with pytest.raises(CheckpointError, match=r"manifest\.json|no checkpoint"):
            store.load(path)


def test_an_unpacked_torch_archive_is_refused(tmp_path: Path, canary: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(_torch_file(canary))) as archive:
        archive.extractall(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        CheckpointStore(tmp_path).load(1)


@pytest.mark.parametrize(
    "name", ["model.pt", "../outside.json", "/etc/hostname.json", "a/b.json", ".x.json", "manifest.json"]
)
def test_a_manifest_can_name_only_safe_files_beside_it(tmp_path: Path, name: str) -> None:
    path = CheckpointStore(tmp_path).save(state(1), step=1, wait=True)
    _reseal(path, **{name: manifest.FileRecord("0" * 64, 1)})
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_checkpoint(path)


def test_files_the_manifest_does_not_list_are_not_read(tmp_path: Path, canary: Path) -> None:
    path = CheckpointStore(tmp_path / "store").save(state(1), step=1, wait=True)
    (path / "extra.pt").write_bytes(pickle.dumps(Bomb(canary)))
    (path / "extra.safetensors").write_bytes(pickle.dumps(Bomb(canary)))
    assert set(read_checkpoint(path).tree) == {"model", "optimizer"}


@pytest.mark.parametrize(
    "body",
    [None, 3, [], {}, {"schema_version": "1"}, {"schema_version": 0}, {"schema_version": 1, "step": {}, "files": []}],
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(tmp_path: Path, body: Any) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest._seal(body))
    with pytest.raises(DamagedCheckpointError, match="is not a manifest"):
        manifest.read_manifest(tmp_path)


def test_absurdly_nested_json_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(state(1), step=1, wait=True)
    (path / "state.json").write_bytes(b'{"tree":' + b"[" * 200_000)
    _reseal(path)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        read_checkpoint(path)


# Disks and crashes.


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit_bytes", [0, 100, 5_000, 50_000])
def test_a_disk_that_takes_no_more_leaves_the_last_good_one_intact(tmp_path: Path, limit_bytes: int) -> None:
    warnings: list[str] = []
    store = CheckpointStore(tmp_path, keep_last=1, on_warning=warnings.append)
    store.save(state(1, 20_000), step=1, wait=True)
    with largest_file(limit_bytes):
        store.save(state(2, 20_000), step=2)
        with pytest.raises(CheckpointError, match=r"step 2 .*File too large; the last good one is step-00000001"):
            store.wait()
    assert len(warnings) == 1
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000001"]
    assert store.load().tree["model"]["w"][0] == 1
    store.save(state(3, 20_000), step=3, wait=True)
    assert store.load().step == 3


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False, timeout=100
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True, timeout=100)


def test_a_full_disk_leaves_the_last_good_one_intact(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk, keep_last=1, on_warning=lambda text: None)
    store.save(state(1, 80_000), step=1, wait=True)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match="No space left on device; the last good one is step-00000001"):
            store.save(state(step, 80_000), step=step, wait=True)
    assert sorted(os.listdir(tiny_disk)) == ["last", "step-00000001"]
    assert store.load().step == 1
    store.save(state(4, 10), step=4, wait=True)
    assert store.load().step == 4


def _save_forever(directory: Path) -> None:
    store = CheckpointStore(directory, keep_last=2)
    step = 0
    while True:
        step += 1
        store.save(state(step, 200_000), step=step, metric=1 / step)


@pytest.mark.slow
def test_sigkill_at_any_instant_of_a_save_leaves_a_newest_checkpoint_that_loads(tmp_path: Path) -> None:
    draw = random.Random(0)
    for trial in range(10):
        directory = tmp_path / str(trial)
        (pid,) = spawn(lambda directory=directory: _save_forever(directory))
        deadline = time.monotonic() + 30
        while not (directory / "last").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        kill([pid])
        assert reap([pid]) == [-signal.SIGKILL]
        warnings: list[str] = []
        store = CheckpointStore(directory, on_warning=warnings.append)
        loaded = store.load()
        assert warnings == []
        assert loaded.step == store.steps()[-1]
        assert loaded.tree["model"]["w"].unique().tolist() == [float(loaded.step)]
        assert loaded.tree["optimizer"]["state"][0]["exp_avg"].unique().tolist() == [-float(loaded.step)]
        for link in ("last", "best"):
            assert not os.path.lexists(directory / link) or (directory / link / "manifest.json").exists()
        assert not [name for name in os.listdir(directory) if name.startswith(".tmp")]
        store.save(state(loaded.step + 1), step=loaded.step + 1, wait=True)
        assert store.load().step == loaded.step + 1
        assert json.loads((directory / "last" / "manifest.json").read_bytes())["body"]["step"] == loaded.step + 1
