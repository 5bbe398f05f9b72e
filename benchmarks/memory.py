"""Resident memory over 10,000 steps with logging and saving: the slope must be none."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.spread import shown
from etude import Callback, Trainer, TrainingConfiguration

STEPS = 10_000


class Watch(Callback):
    """Read the process's resident memory every 250 steps."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.points: list[tuple[int, float]] = []

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step % 250 == 0:
            gc.collect()
            self.points.append((trainer.progress.step, self.process.memory_info().rss / 2**20))


class Small(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": policy(batch["x"]).square().mean()}


def measure() -> float:
    """Return MiB per 1,000 steps, fitted over the second half of the run, when caches are full."""
    torch.set_num_threads(1)
    watch = Watch()
    config = TrainingConfiguration(training_steps=STEPS, batch_size=16, log_every=10, save_every=500, ema_decay=0.99)
    with tempfile.TemporaryDirectory() as folder:
        data = {"x": torch.randn(512, 32)}
        policy = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        Small(policy, data, config=config, run=folder, callbacks=[watch], show_progress=False).fit()
    late = [(step, mib) for step, mib in watch.points if step > STEPS // 2]
    mean_step = sum(step for step, _ in late) / len(late)
    mean_mib = sum(mib for _, mib in late) / len(late)
    above = sum((step - mean_step) * (mib - mean_mib) for step, mib in late)
    slope = above / sum((step - mean_step) ** 2 for step, _ in late) * 1000
    print(f"  {late[0][1]:.1f} MiB at step {late[0][0]}, {late[-1][1]:.1f} MiB at step {late[-1][0]}")
    return slope


def main() -> float:
    """Print and return the slope."""
    return shown(f"memory: {{:+.3f}} MiB per 1,000 steps over {STEPS:,} steps (goal: none, within 0.1)", measure())


if __name__ == "__main__":
    main()
