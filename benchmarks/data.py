"""Batches per second of MapData over in-memory windows, against torch's DataLoader over the same windows."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.spread import shown
from etude.data import MapData, Windows
from etude.types.protocols import Place

GOAL = 5.0
BATCH_SIZE = 64
BATCHES = 100
ROUNDS = 7


def windows() -> Windows:
    """Make 50 episodes of 200 frames, with a window of 2 observations and 16 actions."""
    rng = np.random.default_rng(0)
    columns = {
        "observation.state": rng.standard_normal((10_000, 14), dtype=np.float32),
        "action": rng.standard_normal((10_000, 14), dtype=np.float32),
    }
    return Windows(columns, np.arange(200, 10_001, 200), {"observation.state": [-1, 0], "action": list(range(16))})


def cpu_s(run: Callable[[], None]) -> float:
    """Return the CPU time that a run takes."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure() -> float:
    """Return how many times faster than DataLoader we are: CPU time, the least of several interleaved rounds."""
    dataset = windows()
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=0)
    data = MapData(dataset)
    data.open(Place(batch_size=BATCH_SIZE))

    def theirs() -> None:
        for _ in islice(loader, BATCHES):
            pass

    def ours() -> None:
        for step in range(BATCHES):
            data.take(step)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = [(cpu_s(theirs), cpu_s(ours)) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    return min(theirs_s for theirs_s, _ in rounds) / min(ours_s for _, ours_s in rounds)


def main() -> float:
    """Print and return the ratio."""
    return shown(f"data: {{:.1f}}x DataLoader (goal >= {GOAL:.0f})", measure())


if __name__ == "__main__":
    main()
