"""What checkpoints cost: the loop that waits, the thread that writes, and loading, beside copies and torch's files.

The loop waits for a copy of the state into memory that is already there. Writing is compared with `torch.save` and
fsync, loading with `torch.load(weights_only=True)`; both of ours hash every byte, and writing reads it back.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.spread import Spread
from etude.runs.checkpoint import CheckpointStore

MEBIBYTES, TENSORS, ROUNDS = 64, 64, 11


def torch_save(state: object, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def measure() -> tuple[Spread, Spread, Spread]:
    """Return the ratios of CPU times for waiting, writing and loading, each pair taken in turn."""
    torch.set_num_threads(1)
    each = MEBIBYTES * 2**20 // 4 // TENSORS
    state = {f"layer{i}.weight": torch.randn(each) for i in range(TENSORS)}
    copies = {name: value.clone() for name, value in state.items()}
    tree = {"policy": state, "session": {"step": 0}}
    waits, writes, loads = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        store, plain = CheckpointStore(Path(folder) / "ours"), Path(folder) / "theirs.pt"
        store.reserve(tree)
        store.save(tree, step=0, wait=True)
        for step in range(1, ROUNDS + 1):
            times = [time.process_time()]
            for name, value in state.items():
                copies[name].copy_(value)
            times.append(time.process_time())
            blocked = -time.thread_time()
            store.save(tree, step=step)
            blocked += time.thread_time()
            store.wait()
            times.append(time.process_time())
            torch_save(state, plain)
            times.append(time.process_time())
            store.load(step)
            times.append(time.process_time())
            torch.load(plain, weights_only=True)
            times.append(time.process_time())
            copy, save, theirs, load, their_load = (after - before for before, after in pairwise(times))
            waits.append(blocked / copy)
            writes.append(save / theirs)
            loads.append(load / their_load)
    return Spread.of(waits), Spread.of(writes), Spread.of(loads)


def main() -> float:
    """Print the ratios and return the one that has a goal."""
    waiting, writing, loading = measure()
    print(f"checkpoint: a save of {MEBIBYTES} MiB blocks the loop {waiting} of a memory copy (goal <= 1.3)")
    print(f"checkpoint: saved, hashed, synced and read back, it costs {writing} of torch.save with fsync")
    print(f"checkpoint: loading it verified costs {loading} of torch.load")
    return waiting.median


if __name__ == "__main__":
    main()
