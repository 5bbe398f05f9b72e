"""The run that gets killed: small, but with everything that makes resuming hard."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from etude import Callback, Loss, Trainer, TrainingConfiguration
from etude.config.training import OptimizerConfiguration


@dataclass(frozen=True)
class Case:
    """One cell of the matrix of things that a resume must get right."""

    dropout: bool = True
    augment: bool = True
    accumulate: int = 2
    workers: int = 0
    two_optimizers: bool = True
    ranks: int = 1
    samples: int = 37
    """Prime and small: epochs end inside steps, and some saves fall on an epoch's edge."""
    save_every: int = 2
    evaluate: bool = True
    steps: int = 20


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples whose augmentation draws from all three global generators."""

    def __init__(self, samples: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 6, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(6) + 0.1 * float(np.random.standard_normal()) + 0.1 * random.random()
        # Unequal weights, as tokens of unequal sequences have.
        return {"x": x, "y": self.y[index], "mask": torch.tensor(float(1 + index % 3))}


class Net(nn.Module):
    """Two parts, so that each can have its own optimizer."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3 if dropout else 0.0))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class WeightedTrainer(Trainer):
    """A loss with unequal weights and a metric beside it."""

    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Loss:
        error = (policy(batch["x"]) - batch["y"]).square().squeeze(1)
        total = (error * batch["mask"]).sum()
        return Loss(total, batch["mask"].sum(), {"worst": error.detach().max()})


def train(case: Case, run_dir: Path, callbacks: Sequence[Callback] = ()) -> None:
    """Train (or go on training) the case to its end."""
    torch.set_num_threads(1)
    optimizers = {}
    if case.two_optimizers:
        optimizers = {
            "body": OptimizerConfiguration(match=["body.*"], type="adamw", lr=1e-2, schedule="cosine", warmup_steps=3),
            "head": OptimizerConfiguration(
                match=["head.*"], type="sgd", lr=1e-2, params={"momentum": 0.9}, clip_norm=0.5
            ),
        }
    config = TrainingConfiguration(
        lr=1e-2,
        schedule="cosine",
        warmup_steps=3,
        batch_size=4,
        gradient_accumulation_steps=case.accumulate,
        num_workers=case.workers,
        training_steps=case.steps,
        optimizers=optimizers,
        ema_decay=0.9,
        log_every=3,
        save_every=case.save_every,
        evaluate_every=4 if case.evaluate else None,
        seed=7,
    )
    trainer = WeightedTrainer(
        Net(case.dropout),
        Noisy(case.samples, case.augment),
        config=config,
        run=run_dir,
        eval_data=Noisy(11, False) if case.evaluate else None,
        loggers=[],
        callbacks=callbacks,
        show_progress=False,
    )
    trainer.fit()
