"""Time that a save keeps the loop waiting, over a plain copy of the same state into memory that is already there."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from etude.runs.checkpoint import CheckpointStore


def measure(mebibytes: int = 64, tensors: int = 64, rounds: int = 9) -> float:
    """Return the ratio of least CPU times, copy and save taken in turn."""
    torch.set_num_threads(1)
    each = mebibytes * 2**20 // 4 // tensors
    state = {f"layer{i}.weight": torch.randn(each) for i in range(tensors)}
    copies = {name: value.clone() for name, value in state.items()}
    tree = {"policy": state, "session": {"step": 0}}
    saves, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        store.reserve(tree)
        store.save(tree, step=0, wait=True)
        for step in range(1, rounds + 1):
            started = time.thread_time()
            for name, value in state.items():
                copies[name].copy_(value)
            plain.append(time.thread_time() - started)
            started = time.thread_time()
            store.save(tree, step=step)
            saves.append(time.thread_time() - started)
            store.wait()
    middle = statistics.median(saves)
    print(f"  copy {min(plain) * 1000:.1f} ms, save {min(saves) * 1000:.1f} ms (median {middle * 1000:.1f})")
    return min(saves) / min(plain)


def main() -> float:
    """Print and return the ratio."""
    ratio = measure()
    print(f"checkpoint: a save of 64 MiB blocks the loop {ratio:.2f}x as long as a memory copy (goal <= 1.3)")
    return ratio


if __name__ == "__main__":
    main()
