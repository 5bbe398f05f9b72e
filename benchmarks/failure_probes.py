"""What goes wrong in training, tried in one run on transformers, on Lightning and on Etude's trainers beside them.

- kill: SIGKILL while a run saves every step; usable if training goes on from what is left.
- resume: nine resume points in the middle of an epoch, with dropout and random augmentation; exact if the weights end
  the same, bit for bit.
- nan: one bad sample; safe if training stops with every weight finite.
- split: a mean over tokens, 16 samples in one batch or in several; how far the update is off. Etude's is not always
  nought but may be a few units of 1e-16: sums of float64 in another order round differently.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import get_last_checkpoint

from etude import Loss
from etude.engines.huggingface import BaseTrainer
from etude.engines.lightning import Trainer as LightningTrainer
from etude.engines.lightning import load_checkpoint
from etude.errors import EtudeError

KILLS, POINTS, SAMPLES, BATCH = 10, 9, 40, 4
STEPS = SAMPLES // BATCH * 2
Row = dict[str, Tensor]


class Samples(Dataset[Row]):
    """Samples with random augmentation; one may be bad."""

    def __init__(self, bad: int | None = None) -> None:
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sum(1, keepdim=True).sin()
        if bad is not None:
            self.x[bad] = torch.nan

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Row:
        return {"x": self.x[index] + 0.1 * torch.randn(6), "y": self.y[index], "mask": torch.ones(1)}


class Tokens(Dataset[Row]):
    """Sixteen samples of one to seven tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(16, 7, 6, generator=generator, dtype=torch.float64)
        self.mask = (torch.arange(7) < torch.randint(1, 8, (16, 1), generator=generator)).double().unsqueeze(-1)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Row:
        x = self.x[index]
        return {"x": x, "y": x.sum(-1, keepdim=True), "mask": self.mask[index]}


class Net(nn.Module):
    """A model of the user's."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def summed(model: Any, batch: Row) -> tuple[Tensor, Tensor]:
    """Return the sum of the errors that count, and how many those are."""
    return ((model(batch["x"]) - batch["y"]).square() * batch["mask"]).sum(), batch["mask"].sum()


@dataclass
class Job:
    """What one trainer is asked to do."""

    root: Path
    data: Dataset[Row]
    steps: int = STEPS
    batch: int = BATCH
    accumulate: int = 1
    saves: bool = False
    keep: int | None = None
    resume: Any = None
    rate: float = 1e-2
    optimizer: str = "adamw"

    @property
    def loader(self) -> DataLoader[Row]:
        return DataLoader(self.data, self.batch, shuffle=isinstance(self.data, Samples))


# -- the four trainers ----------------------------------------------------------------------------------------------


class PlainTrainer(transformers.Trainer):
    """transformers alone, with a mean as people write it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        total, weight = summed(model, inputs)
        return total / weight


class EtudeTrainer(BaseTrainer):
    """Ours, with a loss that says what it counts."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return Loss(*summed(model, inputs))


class Module(lightning.LightningModule):
    """A module for Lightning alone and for ours."""

    def __init__(self, model: nn.Module, job: Job, says_weight: bool) -> None:
        super().__init__()
        self.model, self.job, self.says_weight = model, job, says_weight

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        total, weight = summed(self.model, batch)
        return Loss(total, weight) if self.says_weight else total / weight

    def configure_optimizers(self) -> Any:
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        return kinds[self.job.optimizer](self.parameters(), lr=self.job.rate)


def with_transformers(ours: bool, model: nn.Module, job: Job) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(job.root), max_steps=job.steps, learning_rate=job.rate, lr_scheduler_type="constant",
        optim="sgd" if job.optimizer == "sgd" else "adamw_torch", gradient_accumulation_steps=job.accumulate,
        per_device_train_batch_size=job.batch, max_grad_norm=0.0, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False, save_strategy="steps" if job.saves else "no", save_steps=1,
        save_total_limit=job.keep,
    )  # fmt: skip
    if ours:
        EtudeTrainer(model=model, args=args, train_loader=job.loader).train(resume_from_checkpoint=job.resume)
    else:
        PlainTrainer(model=model, args=args, train_dataset=job.data).train(resume_from_checkpoint=job.resume)


def with_lightning(ours: bool, model: nn.Module, job: Job) -> None:
    lightning.seed_everything(0, verbose=False)
    limit = {"save_top_k": -1} if job.keep is None else {"save_top_k": 1, "save_last": True}
    saver = ModelCheckpoint(dirpath=job.root, every_n_train_steps=1, filename="{step}", **limit)  # type: ignore[arg-type]
    kind: Any = LightningTrainer if ours else lightning.Trainer
    double = {"precision": "64-true"} if isinstance(job.data, Tokens) else {}
    kind(
        max_steps=job.steps, max_epochs=-1, accelerator="cpu", accumulate_grad_batches=job.accumulate, logger=False,
        enable_checkpointing=job.saves, callbacks=[saver] if job.saves else [], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=job.root, **double,
    ).fit(Module(model, job, ours), job.loader, ckpt_path=job.resume)  # fmt: skip


@dataclass
class Contender:
    """A trainer and how its checkpoints are found."""

    name: str
    train: Callable[[nn.Module, Job], None]
    file: str
    """Where the checkpoint of a step is."""
    newest: Callable[[Path], tuple[Any, int]]
    """What one resumes a killed run from, and its step."""


def _newest_folder(root: Path) -> tuple[Any, int]:
    return True, int((get_last_checkpoint(str(root)) or "-0").rpartition("-")[2])


def _newest_file(root: Path) -> tuple[Any, int]:
    path = root / "last.ckpt"
    found = load_checkpoint(path) if path.is_dir() else torch.load(path, map_location="cpu", weights_only=True)
    return path, int(found["global_step"])


CONTENDERS = (
    Contender("transformers", lambda m, j: with_transformers(False, m, j), "checkpoint-{}", _newest_folder),
    Contender("Etude BaseTrainer", lambda m, j: with_transformers(True, m, j), "checkpoint-{}", _newest_folder),
    Contender("Lightning", lambda m, j: with_lightning(False, m, j), "step={}.ckpt", _newest_file),
    Contender("Etude Lightning", lambda m, j: with_lightning(True, m, j), "step={}.ckpt", _newest_file),
)


# -- the probes -----------------------------------------------------------------------------------------------------


def kill(who: Contender, root: Path) -> str:
    draw, usable = random.Random(0), 0
    for trial in range(KILLS):
        directory = root / f"kill-{trial}"
        pid = _fork(partial(who.train, Net(), Job(directory, Samples(), 100_000, saves=True, keep=2)))
        while not list(directory.glob(who.file.format(draw.choice((3, 4, 5))))):
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with contextlib.suppress(Exception):  # whatever it is, training does not go on
            resume, step = who.newest(directory)
            who.train(Net(), Job(directory, Samples(), step + 1, saves=True, resume=resume))
            usable += 1
    return f"{usable}/{KILLS}"


def resume(who: Contender, root: Path) -> str:
    whole = Net()
    who.train(whole, Job(root / "whole", Samples(), saves=True))
    exact = 0
    for step in range(1, POINTS + 1):  # ten steps an epoch
        model = Net()
        found = str(root / "whole" / who.file.format(step))
        who.train(model, Job(root / f"resumed-{step}", Samples(), resume=found))
        exact += all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))
    return f"{exact}/{POINTS}"


def nan(who: Contender, root: Path) -> str:
    model, stopped = Net(), False
    try:
        who.train(model, Job(root / "nan", Samples(bad=11)))
    except EtudeError:
        stopped = True
    finite = all(bool(value.isfinite().all()) for value in model.parameters())
    return f"{'stopped' if stopped else 'trained on'}, {'weights good' if finite else 'weights NaN'}"


def split(who: Contender, root: Path) -> str:
    start = _flat(Net(0.0).double())
    found = {}
    for size in (16, 4, 1):
        model = Net(0.0).double()
        who.train(model, Job(root / "split", Tokens(), 1, size, 16 // size, rate=0.1, optimizer="sgd"))
        found[size] = _flat(model)
    moved = (found[16] - start).norm()
    return " / ".join(f"{float((found[size] - found[16]).norm() / moved):.2g}" for size in (4, 1))


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten().clone() for value in model.parameters()])


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


PROBES: dict[str, Callable[[Contender, Path], str]] = {
    "usable after SIGKILL while saving": kill,
    "exact resumes with augmentation": resume,
    "one bad sample": nan,
    "update error of 4x4 / 1x16": split,
}


def main() -> dict[str, dict[str, str]]:
    """Print the table and return it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    table: dict[str, dict[str, str]] = {}
    for title, probe in PROBES.items():
        table[title] = {}
        for who in CONTENDERS:
            with tempfile.TemporaryDirectory() as folder, _silence():
                table[title][who.name] = probe(who, Path(folder))
    print(f"{'':34s}" + "".join(f"{who.name:26s}" for who in CONTENDERS))
    for title, row in table.items():
        print(f"{title:34s}" + "".join(f"{found:26s}" for found in row.values()))
    return table


if __name__ == "__main__":
    main()
