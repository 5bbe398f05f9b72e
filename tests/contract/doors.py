"""The doors under contract: the run of `subjects.train`, made by `BaseTrainer` and by `lightning.Trainer`."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments

from etude import Loss
from etude.engines.huggingface import BaseTrainer
from etude.engines.huggingface.checkpoints import newest_good, saved_in
from etude.engines.lightning import Trainer, load_checkpoint
from etude.runs.tensor_file import read_tensor_file
from tests.contract.subjects import GLOBAL_BATCH, SETTINGS, BrokenData, Subject, make_loader
from tests.crash.workload import Net, Noisy, WeightedTrainer

VALIDATED = 20
"""Batches or steps between two evaluations."""


class WeightedPolicy(Net):
    """The policy of the contract with its loss inside, as the doors want it; float64 where asked."""

    def forward(self, batch: dict[str, Tensor]) -> Loss:  # type: ignore[override]
        parts = {name: value.to(self.head.weight.dtype) for name, value in batch.items()}
        return WeightedTrainer.compute_loss(self, super().forward, parts)  # type: ignore[arg-type]


class Rows:
    """Appends what is logged to a file, as a list of rows by step."""

    def __init__(self, run: Path) -> None:
        self.path = run / "rows.jsonl"

    def write(self, step: int, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, row]) + "\n")

    def read(self) -> dict[str, Any]:
        """Return what was logged of each step: what a killed run wrote again counts once."""
        rows: dict[str, Any] = {}
        for line in self.path.read_text().splitlines():
            step, row = json.loads(line)
            rows.setdefault(str(step), {}).update(row)
        return rows


def train(
    subject: Subject, run: Path, *, kind: Any = None, callbacks: list[Any] | None = None, plain: bool = False,
    bad: int | None = None, **config: Any,
) -> None:  # fmt: skip
    """Train, or go on training, through a door, with the settings of the contract as far as it has them."""
    torch.set_num_threads(1)
    run.mkdir(parents=True, exist_ok=True)
    split = {"batch_size": 4, "gradient_accumulation_steps": GLOBAL_BATCH // 4 // subject.ranks}
    settings = {**SETTINGS, "weight_decay": 0.01, **split, **config}
    policy = WeightedPolicy(dropout=not plain)
    if settings.get("precision") == "float64":
        policy.double()
    samples = Noisy(37, augment=not plain)
    if bad is not None:
        samples.x[bad] = torch.nan
    data = make_loader(samples, settings["batch_size"], plain)
    disturb = Disturbance(callbacks[0] if callbacks else None, kind is BrokenData)
    DOORS[subject.engine](subject, run, policy, data, disturb, settings)


class Disturbance:
    """Sends a signal after a step, or fails in one."""

    def __init__(self, signal: Any, broken: bool) -> None:
        self.signal, self.broken = signal, broken

    def after(self, step: int) -> None:
        if self.broken and step == 6:
            raise OSError("the disk has gone")
        if self.signal is not None and step == self.signal.step:
            os.kill(os.getpid(), self.signal.number)


# -- transformers -----------------------------------------------------------------------------------------------------


class _Watch(TrainerCallback):
    def __init__(self, run: Path, disturb: Disturbance) -> None:
        self.rows, self.disturb = Rows(run), disturb

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # The summary at the end is of one call of `train`, in transformers too.
        if state.is_world_process_zero and "train_loss" not in logs:
            kept = {name: value for name, value in logs.items() if "runtime" not in name and "second" not in name}
            self.rows.write(state.global_step, kept)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.disturb.after(state.global_step)


def _train_base(subject: Subject, run: Path, policy: Any, data: Any, disturb: Disturbance, settings: Any) -> None:
    evaluates = {"eval_strategy": "steps", "eval_steps": VALIDATED} if settings["evaluate_every"] else {}
    arguments = TrainingArguments(
        output_dir=str(run), max_steps=settings["training_steps"], learning_rate=settings["lr"],
        lr_scheduler_type=settings["schedule"], warmup_steps=settings["warmup_steps"],
        max_grad_norm=settings["clip_norm"],
        gradient_accumulation_steps=settings["gradient_accumulation_steps"], logging_steps=settings["log_every"],
        save_strategy="steps", save_steps=settings["save_every"], seed=settings["seed"], use_cpu=True,
        disable_tqdm=True, report_to="none", weight_decay=settings["weight_decay"], **evaluates,
    )  # fmt: skip
    trainer = BaseTrainer(
        policy, arguments, train_loader=data, eval_loader=DataLoader(Noisy(11, augment=False), batch_size=4),
        callbacks=[_Watch(run, disturb)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=bool(saved_in(run)))


def _end_of_base(run: Path) -> dict[str, Any]:
    found = newest_good(run)
    kept = {key: value for key, value in found.tree.items() if key != "order"}
    return {"step": found.step, "policy": read_tensor_file(found.path / "model.safetensors"), **kept}


# -- Lightning --------------------------------------------------------------------------------------------------------


class _After(lightning.Callback):
    def __init__(self, disturb: Disturbance) -> None:
        self.disturb, self._at = disturb, -1

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step != self._at:
            self._at = trainer.global_step
            self.disturb.after(self._at)


class _Logged(Logger):
    def __init__(self, run: Path) -> None:
        super().__init__()
        self.rows = Rows(run)

    name, version = "contract", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            self.rows.write(step or 0, dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def _train_lightning(subject: Subject, run: Path, policy: Any, data: Any, disturb: Disturbance, settings: Any) -> None:
    warnings.simplefilter("ignore")  # what Lightning says of small runs
    ranks = {"devices": 2, "strategy": "ddp"} if subject.ranks > 1 else {"devices": 1}
    double = {"precision": "64-true"} if settings.get("precision") == "float64" else {}
    optimizer = {name: settings[name] for name in ("lr", "schedule", "warmup_steps", "weight_decay")}
    saves = ModelCheckpoint(dirpath=run / "saved", save_top_k=-1, every_n_train_steps=settings["save_every"])
    trainer = Trainer(
        max_steps=settings["training_steps"], max_epochs=-1, accelerator="cpu", logger=_Logged(run),
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=run, optimizer=optimizer,
        gradient_clip_val=settings["clip_norm"], accumulate_grad_batches=settings["gradient_accumulation_steps"],
        log_every_n_steps=settings["log_every"], seed=settings["seed"], callbacks=[saves, _After(disturb)],
        check_val_every_n_epoch=None, val_check_interval=VALIDATED, **ranks, **double,
    )  # fmt: skip
    validates = DataLoader(Noisy(11, augment=False), batch_size=4) if settings["evaluate_every"] else None
    trainer.fit(policy, data, validates, ckpt_path=run / "saved" if any((run / "saved").glob("*.ckpt")) else None)
    assert trainer.global_step == settings["training_steps"]


_COUNTS = ("batch_progress", "scheduler_progress", "automatic_optimization.optim_progress")


def _end_of_lightning(run: Path) -> dict[str, Any]:
    found = load_checkpoint(run / "saved")
    policy = {name.removeprefix("policy."): value for name, value in found["state_dict"].items()}
    # Lightning counts validations, and epochs begun, otherwise after a resume; what was trained counts the same.
    counts = {name: found["loops"]["fit_loop"][f"epoch_loop.{name}"] for name in _COUNTS}
    return {
        "step": found["global_step"], "policy": policy, "optimizer": found["optimizer_states"],
        "schedule": found["lr_schedulers"], "counts": counts,
    }  # fmt: skip


# -- what is left behind ----------------------------------------------------------------------------------------------

DOORS = {"BaseTrainer": _train_base, "lightning.Trainer": _train_lightning}


def end_of(subject: Subject, run: Path) -> dict[str, Any]:
    """Return the newest good checkpoint that a door has left: its step, weights, optimizer and schedule."""
    return (_end_of_base if subject.engine == "BaseTrainer" else _end_of_lightning)(run)


def checkpoints(subject: Subject, run: Path) -> dict[int, Path]:
    """Return the checkpoints of a door by their step."""
    if subject.engine == "BaseTrainer":
        return dict(saved_in(run))
    return {int(path.stem.rpartition("=")[2]): path for path in (run / "saved").glob("*step=*.ckpt")}
