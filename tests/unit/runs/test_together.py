"""Checkpoints that several ranks write: here ranks are threads, and the files are real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.errors import CheckpointError
from etude.runs import durable
from etude.runs.checkpoint import CheckpointStore, open_checkpoint, read_checkpoint
from etude.runs.manifest import DamagedCheckpointError, read_manifest, verify
from etude.runs.shards import Piece, Stored, whole

WORLD = 3


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=30)
        self._values: list[Any] = [None] * world

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.rank, self.world, self._threads = rank, threads.world, threads

    def gather(self, value: Any) -> list[Any]:
        return self._threads.gather(self.rank, value)


WEIGHTS = {
    "even": torch.arange(12.0).view(6, 2),
    "uneven": torch.arange(7, dtype=torch.float64),
    "fewer_than_ranks": torch.tensor([3, 4]),
    "none": torch.zeros(0, 5),
    "columns": torch.arange(8.0).view(2, 4),
}


def tree_of(rank: int, world: int = WORLD) -> dict[str, Any]:
    pieces: dict[str, Any] = {}
    for name, weight in WEIGHTS.items():
        dim = int(name == "columns")
        size = -(-weight.shape[dim] // world)
        start = min(rank * size, weight.shape[dim])
        stop = min(start + size, weight.shape[dim])
        pieces[name] = Piece(weight.narrow(dim, start, stop - start), weight.shape, dim)
    return {"policy": {**pieces, "scalar": torch.tensor(5.0)}, "session": {"step": 1, "rank": rank}}


def save(folder: Path, step: int = 1, world: int = WORLD, **options: Any) -> list[CheckpointStore]:
    threads = Threads(world)
    stores = [
        CheckpointStore(folder, peers=Rank(threads, rank), on_warning=lambda _: None, **options)
        for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as pool:
        for done in [pool.submit(stores[r].save, tree_of(r, world), step=step, wait=True) for r in range(world)]:
            done.result()
    return stores


def test_the_parts_become_the_whole_again(tmp_path: Path) -> None:
    stores = save(tmp_path)
    found = stores[0].load("last")
    assert found.tree["session"] == {"step": 1, "rank": 0}
    assert set(found.tree["policy"]) == {*WEIGHTS, "scalar"}
    assert all(torch.equal(found.tree["policy"][name], weight) for name, weight in WEIGHTS.items())
    assert all(found.tree["policy"][name].dtype == weight.dtype for name, weight in WEIGHTS.items())
    verify(found.path)
    assert read_manifest(found.path).schema_version == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def test_a_rank_reads_the_rows_that_it_needs_and_no_others(tmp_path: Path) -> None:
    save(tmp_path)
    tree = open_checkpoint((tmp_path / "last").resolve(), ("policy",)).tree
    stored: Stored = tree["policy"]["even"]
    assert isinstance(stored, Stored) and stored.shape == (6, 2)
    for start, stop in [(0, 6), (1, 2), (1, 5), (3, 3), (5, 6)]:
        assert torch.equal(stored.read(start, stop), WEIGHTS["even"][start:stop])
    assert torch.equal(tree["policy"]["columns"].read(1, 3), WEIGHTS["columns"][:, 1:3])
    assert tree["policy"]["scalar"].read() == 5.0
    (tmp_path / "last" / "policy-00002-of-00003.safetensors").rename(tmp_path / "elsewhere")
    assert torch.equal(stored.read(0, 4), WEIGHTS["even"][:4]), "the rows of the third rank are not asked for"
    with pytest.raises(FileNotFoundError):
        stored.read(0, 5)
    (tmp_path / "elsewhere").rename(tmp_path / "last" / "policy-00002-of-00003.safetensors")
    everything = whole(tree)
    assert all(torch.equal(everything["policy"][name], weight) for name, weight in WEIGHTS.items())
    assert tree["session"] == {"step": 1, "rank": 0}


@pytest.mark.parametrize("part", range(WORLD))
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swap"])
def test_damage_to_any_ranks_file_is_found_and_the_older_one_used(tmp_path: Path, part: int, damage: str) -> None:
    stores = save(tmp_path)
    save(tmp_path, step=2)
    path = tmp_path / "step-00000002" / f"policy-0000{part}-of-00003.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(content[:-8])
    elif damage == "swap":
        path.write_bytes(
            (tmp_path / "step-00000002" / f"policy-0000{(part + 1) % 3}-of-00003.safetensors").read_bytes()
        )
    with pytest.raises(DamagedCheckpointError, match=path.name):
        read_checkpoint(path.parent)
    assert stores[0].load("last").step == 1


@pytest.mark.parametrize("at_fault", range(WORLD))
def test_a_rank_that_cannot_write_fails_all_and_leaves_the_last_good_one(
    tmp_path: Path, at_fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    real: Callable[..., Any] = durable.write_hashed

    def full(path: Path, parts: Any) -> Any:
        if path.name.startswith(f"policy-0000{at_fault}"):
            raise OSError(28, "No space left on device", str(path))
        return real(path, parts)

    monkeypatch.setattr(durable, "write_hashed", full)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .* No space left"):
        save(tmp_path, step=2)
    monkeypatch.undo()
    assert [path.name for path in sorted(tmp_path.glob("*step-*"))] == ["step-00000001"]
    assert not list(tmp_path.glob(".tmp-*"))
    assert save(tmp_path, step=2)[0].load("last").step == 2


def test_bytes_that_did_not_arrive_are_found_by_the_rank_that_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    real: Callable[..., Any] = durable.write_hashed

    def lossy(path: Path, parts: Any) -> Any:
        record = real(path, parts)
        if path.name.startswith("policy-00002"):
            path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        return record

    monkeypatch.setattr(durable, "write_hashed", lossy)
    with pytest.raises(CheckpointError, match=r"policy-00002-of-00003\.safetensors is damaged"):
        save(tmp_path, step=2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000001"]


def test_old_ones_are_pruned_and_a_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        stores = save(tmp_path, step, keep_last=2)
    assert stores[0].steps() == [2, 3]
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-00000002", "step-00000003"]


def test_another_number_of_ranks_writes_beside_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, world=2)
    one, two = (read_checkpoint(tmp_path / f"step-0000000{step}").tree["policy"] for step in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_memory_of_the_last_save_serves_the_next(tmp_path: Path) -> None:
    threads = Threads(1)
    store = CheckpointStore(tmp_path, peers=Rank(threads, 0))
    store.reserve(tree_of(0, 1))
    held = dict(store._staged)
    store.save(tree_of(0, 1), step=1, wait=True)
    assert {id(file) for file in store._staged.values()} == {id(file) for file in held.values()}
    tensors: list[Tensor] = [piece.tensor for piece in tree_of(0, 1)["policy"].values() if isinstance(piece, Piece)]
    assert sum(file.nbytes for file in held.values()) == sum(t.nbytes for t in tensors) + 4
