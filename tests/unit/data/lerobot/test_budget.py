"""Memory and disk stay within the budget that was asked for, above it and below it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.data.lerobot import LeRobotWriter

FEATURES: dict[str, dict[str, Any]] = {
    "observation.images.top": {"dtype": "video", "shape": (96, 96, 3)},
    "action": {"dtype": "float32", "shape": (2,)},
}
EPISODES, LENGTH = 9, 100
ALL_BYTES = EPISODES * LENGTH * 96 * 96 * 3
MOST_GROWTH_BYTES = 18_000_000
"""A batch of 32 pictures, its copies and a decoder take 5 to 13 MB; all pictures together would take 25."""

READ_ALL = """
import json, sys
import numpy as np
from etude.data.lerobot import LeRobotDataset

def private_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

dataset = LeRobotDataset(sys.argv[1], cache_gb=float(sys.argv[2]), cache_dir=sys.argv[3])
keys, seen, before = np.zeros(32, dtype=np.uint64), 0.0, None
for start in range(0, len(dataset) - 31, 32):
    batch = dataset.gather(np.arange(start, start + 32), keys)
    seen += float(batch["observation.images.top"].float().mean())
    before = private_bytes() if before is None else before
print(json.dumps({"growth": private_bytes() - before, "seen": seen}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("budget") / "d"
    ramp = np.arange(96, dtype=np.uint8)[:, None, None] + np.zeros((96, 96, 3), dtype=np.uint8)
    with LeRobotWriter(root, FEATURES, 10) as writer:
        for number in range(EPISODES):
            for frame in range(LENGTH):
                shown = ramp + np.uint8(10 * number + frame % 50)
                writer.add_frame({"observation.images.top": shown, "action": np.zeros(2, np.float32)})
            writer.save_episode("budget")
    return root


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("budget_mb", [0, 20, 40])
def test_reading_all_frames_stays_within_the_budget(root: Path, tmp_path: Path, budget_mb: int) -> None:
    command = [sys.executable, "-c", READ_ALL, str(root), str(budget_mb / 1000), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    decoded = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("frames.u8"))
    print(f"budget {budget_mb} MB: {decoded / 1e6:.1f} MB decoded on disk, {found['growth'] / 1e6:.1f} MB of memory")
    if budget_mb == 40:
        assert ALL_BYTES <= decoded <= 1.01 * ALL_BYTES
    else:
        # Whole episodes only, and as many as fit.
        assert budget_mb * 1e6 - ALL_BYTES / EPISODES <= decoded <= budget_mb * 1e6 or decoded == budget_mb == 0
    assert found["growth"] < MOST_GROWTH_BYTES
    assert found["seen"] > 0
