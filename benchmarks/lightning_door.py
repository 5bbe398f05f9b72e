"""CPU time per step of our Lightning trainer and engine over Lightning alone: same module, data, optimizer, logging.

Rounds are interleaved and the median of the ratios within a round counts: the three runs of a round follow each other
closely, so that they meet the same load of a machine that others use too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import etude
from benchmarks.overhead import make_model
from benchmarks.spread import Spread
from etude.engines.lightning import Trainer

GOAL = 1.03


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A dataset as people write them: one sample at a time."""

    def __init__(self, width: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, width, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Module(lightning.LightningModule):
    """A LightningModule that times itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.spent = model, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.spent = -time.process_time()

    def on_train_end(self) -> None:
        self.spent += time.process_time()


class MeanSquares(etude.Trainer):
    """The same loss, on an engine of ours."""

    def compute_loss(self, policy: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(policy(batch[0]), batch[1])


class Clock(lightning.Callback):
    """Times what a LightningEngine does between its first step and its last."""

    def __init__(self) -> None:
        self.spent = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.spent = -time.process_time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.spent += time.process_time()


def with_lightning(kind: Callable[..., Any], model: nn.Module, data: Dataset[Any], size: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        module = Module(model)
        kind(
            max_steps=steps, max_epochs=-1, accelerator="cpu", gradient_clip_val=1.0, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            logger=lightning.pytorch.loggers.CSVLogger(folder),
        ).fit(module, DataLoader(data, size, shuffle=True))  # fmt: skip
        return module.spent


def with_engine(model: nn.Module, data: Dataset[Any], size: int, steps: int) -> float:
    from etude.engines.lightning import LightningEngine

    clock = Clock()
    config = etude.TrainingConfiguration(
        training_steps=steps, batch_size=size, schedule="cosine", num_threads=1, device="cpu"
    )
    trainer = MeanSquares(
        model, data, engine=LightningEngine(callbacks=[clock]), config=config, run=False, show_progress=False
    )
    trainer.fit()
    return clock.spent


def measure(width: int, depth: int, size: int, steps: int, rounds: int, tensors: bool) -> dict[str, list[float]]:
    """Return the CPU seconds per step of each contender, round by round."""
    samples = Samples(width, 20 * size)
    data: Dataset[Any] = TensorDataset(samples.x, samples.y) if tensors else samples
    contenders: dict[str, Callable[[nn.Module], float]] = {
        "Lightning": lambda model: with_lightning(lightning.Trainer, model, data, size, steps),
        "Etude's Lightning Trainer": lambda model: with_lightning(Trainer, model, data, size, steps),
        "Etude's Lightning engine": lambda model: with_engine(model, data, size, steps),
    }
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contend in contenders.items():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                spent[name].append(contend(make_model(width, depth)) / steps)
    return spent


def main() -> float:
    """Print the tables and return our largest ratio."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    worst = 0.0
    for label, tensors, shape in (
        ("~1 ms step, tensors", True, (128, 3, 256, 100, 9)),
        ("~1 ms step, samples one by one", False, (128, 3, 64, 100, 9)),
        ("~13 ms step, samples one by one", False, (512, 6, 256, 20, 9)),
    ):
        spent = measure(*shape, tensors=tensors)
        base = spent["Lightning"]
        print(f"Lightning, {label} ({min(base) * 1000:.2f} ms with Lightning alone), CPU time per step:")
        for name, seconds in spent.items():
            ratio = Spread.of([mine / theirs for mine, theirs in zip(seconds, base, strict=True)])
            print(f"  {name:26s} {ratio}  (goal <= {GOAL})", flush=True)
            worst = max(worst, ratio.median)
    return worst


if __name__ == "__main__":
    main()
