"""Samples per second from LeRobot datasets on disk (batch 8, chunk 100), and how many times lerobot's loader that is.

lerobot is measured where $ETUDE_LEROBOT_PYTHON names a Python that has it; the same datasets, one process, its own
`LeRobotDataset` under a torch DataLoader. Cold means an empty cache: opening, decoding everything, and one pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.data import LeRobotDataset, LeRobotWriter, MapData
from etude.types.protocols import Place

GOALS = {"state": 20.0, "video": 10.0, "image": 10.0}
GOAL_COLD = 2.0
BATCH_SIZE, CHUNK, FPS = 8, 100, 50
EPISODES, LENGTH, PIXELS = 10, 200, 96
SECONDS = 2.0
BUDGETS_MB = (20, 100)
"""Below and above what the decoded frames of all episodes take (55 MB)."""

READ_ALL = """
import sys
import numpy as np
from etude.data import LeRobotDataset

def private_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

dataset = LeRobotDataset(sys.argv[1], cache_gb=float(sys.argv[2]), cache_dir=sys.argv[3], show_progress=False)
keys, before = np.zeros(8, dtype=np.uint64), None
for start in range(0, len(dataset) - 7, 8):
    dataset.gather(np.arange(start, start + 8), keys)
    before = private_bytes() if before is None else before
print(private_bytes() - before)
"""

LEROBOT = """
import sys, time, json, warnings, logging
warnings.filterwarnings("ignore")
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, fps, chunk, batch, seconds = sys.argv[1], *map(float, sys.argv[2:])
torch.set_num_threads(1)
torch.manual_seed(0)
dataset = LeRobotDataset(
    "bench/bench", root=root, delta_timestamps={"action": [i / fps for i in range(int(chunk))]}, video_backend="pyav"
)
loader = torch.utils.data.DataLoader(dataset, batch_size=int(batch), shuffle=True, num_workers=0)
served, begin = 0, None
while begin is None or time.perf_counter() - begin < seconds:
    for samples in loader:
        if begin is None:
            begin = time.perf_counter()  # the first batch opens files
            continue
        served += len(samples["action"])
        if time.perf_counter() - begin > seconds:
            break
print(json.dumps(served / (time.perf_counter() - begin)))
"""


def features_of(kind: str) -> dict[str, dict[str, Any]]:
    """Describe the dataset of one kind: 14 joints, and one camera unless it is state alone."""
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": (14,)},
        "action": {"dtype": "float32", "shape": (14,)},
    }
    if kind != "state":
        features["observation.images.top"] = {"dtype": kind, "shape": (PIXELS, PIXELS, 3)}
    return features


def record(root: Path, kind: str) -> None:
    """Record smooth motion with a scene that changes from frame to frame."""
    rng = np.random.default_rng(0)
    features = features_of(kind)
    scene = rng.integers(0, 256, (2 * PIXELS, 2 * PIXELS, 3), dtype=np.uint8)
    scene = np.repeat(np.repeat(scene[::8, ::8], 8, 0), 8, 1)
    with LeRobotWriter(root, features, FPS) as writer:
        for _ in range(EPISODES):
            for step in range(LENGTH):
                frame = {name: rng.standard_normal(14, dtype=np.float32) for name in ("observation.state", "action")}
                if kind != "state":
                    at = step * PIXELS // LENGTH
                    frame["observation.images.top"] = scene[at : at + PIXELS, at // 2 : at // 2 + PIXELS]
                writer.add_frame(frame)
            writer.save_episode("bench")


def open_data(root: Path, cache: Path) -> MapData:
    """Open our loader as the Trainer would."""
    dataset = LeRobotDataset(root, cache_dir=cache, show_progress=False)
    dataset.use_windows(observation=None, action=range(CHUNK))
    data = MapData(dataset)
    data.open(Place(batch_size=BATCH_SIZE))
    return data


def measure_ours(root: Path, cache: Path) -> tuple[float, float]:
    """Return samples per second cold (opening and one pass) and warm."""
    shutil.rmtree(cache, ignore_errors=True)
    begin = time.perf_counter()
    data = open_data(root, cache)
    for step in range(data.length // BATCH_SIZE):
        data.take(step)
    cold = data.length / (time.perf_counter() - begin)
    data = open_data(root, cache)
    data.take(0)
    step, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        step += 1
        data.take(step)
    return cold, step * BATCH_SIZE / (time.perf_counter() - begin)


def measure_memory(root: Path, cache: Path, budget_mb: int) -> tuple[float, float]:
    """Return MB of decoded frames on disk, and by how many MB the memory of a process grows that reads all frames."""
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, "-c", READ_ALL, str(root), str(budget_mb / 1000), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    decoded = sum(path.stat().st_blocks * 512 for path in cache.rglob("frames.u8"))
    return decoded / 1e6, float(done.stdout.splitlines()[-1]) / 1e6


def measure_lerobot(root: Path) -> float | None:
    """Return lerobot's samples per second, if it is to be had."""
    python = os.environ.get("ETUDE_LEROBOT_PYTHON")
    if not python:
        return None
    numbers = [str(value) for value in (FPS, CHUNK, BATCH_SIZE, 3 * SECONDS)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(root.parent / "hf")}
    done = subprocess.run(
        [python, "-c", LEROBOT, str(root), *numbers], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    if done.returncode:
        print(f"lerobot failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Print one line for each kind of dataset."""
    torch.set_num_threads(1)
    print(
        f"samples/s, batch {BATCH_SIZE}, chunk {CHUNK}, {EPISODES} episodes of {LENGTH} frames, {PIXELS} px, 1 process"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, goal in GOALS.items():
            root = Path(folder) / kind
            record(root, kind)
            cold, warm = measure_ours(root, Path(folder) / "cache")
            theirs = measure_lerobot(root)
            line = f"{kind:6} etude warm {warm:8.0f}  cold {cold:7.0f}"
            if theirs is not None:
                line += f"  lerobot {theirs:6.1f}  warm {warm / theirs:6.1f}x (goal {goal:.0f}x)"
                line += f"  cold {cold / theirs:5.1f}x (goal {GOAL_COLD:.0f}x)"
            print(line)
            if kind != "state" and Path("/proc/self/status").exists():
                for budget_mb in BUDGETS_MB:
                    disk, memory = measure_memory(root, Path(folder) / "cache", budget_mb)
                    print(f"{'':6} budget {budget_mb:4d} MB: {disk:6.1f} MB decoded, memory grows by {memory:5.1f} MB")


if __name__ == "__main__":
    main()
