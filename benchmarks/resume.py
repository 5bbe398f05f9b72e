"""Time to the first step after resuming at step 10,000, over that of a fresh start: shuffled data with augmentation."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.spread import Spread, shown
from etude import Trainer, TrainingConfiguration
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import SingleProcess

FAR = 10_000


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int) -> None:
        self.x = torch.randn(rows, 32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index] + 0.1 * torch.randn(32)}


class Norm(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Tensor:
        return policy(batch["x"]).square().mean()


def first_step(run: Path, data: Rows, steps: int) -> float:
    """Return the CPU seconds from opening the run to the end of its next step."""
    config = TrainingConfiguration(training_steps=steps, batch_size=32)
    trainer = Norm(nn.Linear(32, 8), data, config=config, run=run, loggers=[], show_progress=False)
    group = Group()
    started = time.process_time()
    with Session(trainer, group, SingleProcess(group)).running("auto") as session:
        session.take_step()
        return time.process_time() - started


def measure(rounds: int = 15) -> float:
    """Return the median ratio of CPU times, fresh and resumed taken in turn."""
    torch.set_num_threads(1)
    data = Rows(20_000)
    fresh, resumed = [], []
    with tempfile.TemporaryDirectory() as folder:
        far = Path(folder) / "far"
        config = TrainingConfiguration(training_steps=1, batch_size=32)
        Norm(nn.Linear(32, 8), data, config=config, run=far, loggers=[], show_progress=False).fit()
        checkpoint = _move_to_step(far, FAR)
        for number in range(rounds):
            fresh.append(first_step(Path(folder) / f"fresh{number}", data, 2 * FAR))
            resumed.append(first_step(checkpoint, data, 2 * FAR))
    ratio = Spread.of([late / early for late, early in zip(resumed, fresh)])
    print(f"  fresh {min(fresh) * 1000:.1f} ms, resumed at step {FAR} {min(resumed) * 1000:.1f} ms; {ratio}")
    return ratio.median


def _move_to_step(run: Path, step: int) -> Path:
    """Give a run a checkpoint of a late step without training that long: only the counters differ."""
    from etude.runs.checkpoint import CheckpointStore

    store = CheckpointStore(run / "checkpoints")
    tree = store.load().tree
    tree["session"]["progress"]["step"] = step
    store.save(tree, step=step, wait=True)
    return run


def main() -> float:
    """Print and return the ratio."""
    return shown(f"resume: first step at {FAR:,} takes {{:.2f}}x that of a fresh start (goal <= 1.2)", measure())


if __name__ == "__main__":
    main()
