"""Who is under contract, and the run that each must make: every engine and every door, alone and with two ranks."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from etude import Callback, Trainer, TrainingConfiguration
from tests.crash.workload import Net, Noisy, WeightedTrainer


@dataclass(frozen=True)
class Subject:
    """An engine, or a door for code that is written for another library, with so many ranks."""

    engine: str
    ranks: int = 1

    def __str__(self) -> str:
        return self.engine if self.ranks == 1 else f"{self.engine} x {self.ranks}"

    @property
    def has_driver(self) -> bool:
        """Whether one process starts the ranks and speaks for them; starting them then takes many seconds."""
        return self.engine == "ray"

    @property
    def is_door(self) -> bool:
        """Whether the other library makes the steps, with settings and checkpoints of its own."""
        return self.engine in DOORS

    @property
    def processes(self) -> int:
        """How many processes a user starts."""
        return 1 if self.has_driver else self.ranks

    def make_engine(self, **options: Any) -> Any:
        """Return what a trainer takes as its engine."""
        if not self.has_driver:
            return self.engine
        from etude.engines.ray import RayEngine

        return RayEngine(num_workers=self.ranks, **options)


ENGINES = ("torch", "huggingface", "lightning", "ray")
DOORS = ("BaseTrainer", "lightning.Trainer")
"""`etude.engines.huggingface.BaseTrainer` and `etude.engines.lightning.Trainer`."""
COLUMNS = (*ENGINES, *DOORS)
SUBJECTS = [Subject(column, ranks) for column in COLUMNS for ranks in (1, 2)]

GLOBAL_BATCH = 8
SETTINGS: dict[str, Any] = {
    "training_steps": 50, "lr": 1e-2, "schedule": "cosine", "warmup_steps": 5, "clip_norm": 0.5, "ema_decay": 0.9,
    "log_every": 7, "evaluate_every": 20, "save_every": 5, "keep_last": 100, "device": "cpu", "seed": 3,
}  # fmt: skip
"""With dropout, augmentation, accumulation, clipping, warm-up and averaged weights: everything that can go wrong."""


def train(
    subject: Subject, run: Path, *, kind: type[Trainer] = WeightedTrainer, callbacks: list[Callback] | None = None,
    plain: bool = False, bad: int | None = None, engine: dict[str, Any] | None = None, loads: bool = False,
    **config: Any,
) -> None:  # fmt: skip
    """Train, or go on training, with one rank's share of the global batch.

    `plain` leaves randomness out, and `loads` gives the data as a loader.
    """
    torch.set_num_threads(1)
    data: Any = Noisy(37, augment=not plain)
    if bad is not None:
        data.x[bad] = torch.nan
    split = {"batch_size": 4, "gradient_accumulation_steps": GLOBAL_BATCH // 4 // subject.ranks}
    settings = {**SETTINGS, **split, **config}
    if loads:
        data = make_loader(data, settings["batch_size"], plain)
    for callback in callbacks or []:
        callback.driver = os.getpid()  # type: ignore[attr-defined]
    trainer = kind(
        Net(dropout=not plain), data, engine=subject.make_engine(**engine or {}), run=run, loggers=[],
        callbacks=callbacks or [], config=TrainingConfiguration(**settings),
        eval_data=Noisy(11, augment=False), show_progress=False,
    )  # fmt: skip
    result = trainer.fit()
    assert result.steps == trainer.config.training_steps


def make_loader(data: Any, batch_size: int, plain: bool) -> DataLoader[Any]:
    """Return what a door takes; plain is one global batch, the same whatever the split."""
    if plain:
        return DataLoader(Subset(data, range(GLOBAL_BATCH)), batch_size=batch_size)
    return DataLoader(data, batch_size=batch_size, shuffle=True)


class SendSignal(Callback):
    """Sends a signal after a step, when the checkpoint of an earlier one is safely there.

    SIGKILL goes to this process; others go where a user would send them, which may be the driver of this process.
    """

    driver: int

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        """Send it once."""
        if trainer.progress.step != self.step:
            return
        trainer.session.record.wait()
        if self.driver == os.getpid() or self.number == signal.SIGKILL:
            os.kill(os.getpid(), self.number)
        elif trainer.rank == 0:
            os.kill(self.driver, self.number)
            while not trainer.session.signals.received:
                time.sleep(0.01)


class KilledOnce(WeightedTrainer):
    """A trainer whose first rank is killed in a step, the first time that it comes to it."""

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Die at step 23."""
        if self.rank == 0 and self.progress.step == 23 and self.run is not None:
            mark = self.run.dir / "killed"
            if not mark.exists():
                self.session.record.wait()
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return batch


class BrokenData(WeightedTrainer):
    """A trainer whose data cannot be read after some steps."""

    def prepare_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fail at step 6."""
        if self.progress.step == 6:
            raise OSError("the disk has gone")
        return batch
