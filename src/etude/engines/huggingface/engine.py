"""The engine `huggingface`: transformers drives the loop, its callbacks and reports; Etude makes each step."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState

from etude.callbacks import Callback
from etude.engines.huggingface.options import check_options
from etude.errors import ConfigError
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import make_strategy
from etude.types import Result

if TYPE_CHECKING:
    from etude.trainer import Trainer


class HuggingFaceEngine:
    """Train with the loop, callbacks and reports of transformers.Trainer; every step is Etude's own.

    Numbers are those of the torch engine, bit for bit, and the run directory is Etude's.

    Args:
        options: `TrainingArguments` that act on the model, the process or the reports, such as `report_to` or
            `gradient_checkpointing`. What Etude's configuration decides is refused here.
    """

    def __init__(self, **options: Any) -> None:
        self.options = check_options(options)

    def run(self, trainer: Trainer, resume: str | Path = "auto") -> Result:
        """Train to the requested length and return what came of it."""
        group = Group.join(trainer.config.device)
        find_unused = bool(self.options.get("ddp_find_unused_parameters"))
        strategy = make_strategy("auto", group, find_unused, sync_batch_norm=True)
        with Session(trainer, group, strategy).running(resume) as session:
            if not session.finished:
                self._drive(session)
            return session.finish()

    def _drive(self, session: Session) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            # transformers insists on a directory of its own; what it reports goes into the run's.
            directory = session.record.directory
            try:
                driver = Driver(session, self._arguments(session, str(directory or scratch)))
            except (ImportError, TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(f"engine huggingface: {' '.join(str(error).split())}") from error
            driver.train()

    def _arguments(self, session: Session, directory: str) -> TrainingArguments:
        quiet = {"disable_tqdm": True, "report_to": "none"}
        return TrainingArguments(
            output_dir=directory,
            max_steps=session.total_steps or sys.maxsize,
            seed=session.config.seed % 2**32,
            use_cpu=session.group.device.type == "cpu",
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            logging_nan_inf_filter=False,
            max_grad_norm=0.0,
            remove_unused_columns=False,
            **{**quiet, **self.options},
        )


class Driver(transformers.Trainer):
    """A `transformers.Trainer` whose every step is one step of a session."""

    def __init__(self, session: Session, args: TrainingArguments) -> None:
        self.session = session
        self.rows: list[Mapping[str, float]] = []
        """Rows of the session's log that are still to be reported."""
        super().__init__(model=session.policy, args=args, callbacks=[_Follow(self)])
        self.remove_callback(PrinterCallback)  # Etude shows its own progress
        if args.report_to:
            session.callbacks.callbacks.append(_Report(self.rows))
        if args.gradient_checkpointing and not hasattr(session.policy, "gradient_checkpointing_enable"):
            kind = type(session.policy).__name__
            raise ConfigError(f"engine huggingface: {kind} has no gradient_checkpointing_enable(); leave it out")

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the policy where the session has put it."""

    def get_train_dataloader(self) -> Any:
        """Return a loader that never ends: the session fetches the batches of a step itself."""
        return DataLoader(_Endless(), batch_size=None)

    def get_batch_samples(self, *_: Any) -> tuple[list[Any], None]:
        """Return a stand-in for the one batch that transformers believes a step has."""
        return [{}], None

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        parent: Any = super()
        parent._init_training_state(*args, **kwargs)
        self.state.global_step = self.session.progress.step
        return 0, 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        # Nothing is wrapped: the session's strategy has spread the policy already.
        self.optimizer = self.lr_scheduler = cast(Any, _Idle())
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take one step of the session: losses, guard, update, and whatever is due after it."""
        self.session.take_step()
        return self._tr_loss.new_zeros(())

    def floating_point_ops(self, inputs: Any) -> int:
        """Return nothing known: transformers never sees the batches."""
        return 0

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        return next(iter(self.session.stepper.norms.values()), 0.0)

    def _get_learning_rate(self) -> float:
        return next(optimization.lr for optimization in self.session.optimizations.values())


class _Follow(TrainerCallback):
    """Keeps transformers' account of the run in step with the session's."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Report what the session has logged, and stop when it has finished."""
        session, rows = self._driver.session, self._driver.rows
        state.epoch = session.progress.epochs
        if rows:
            for row in rows:
                self._driver.log({_report_name(name): value for name, value in row.items() if name != "epoch"})
            rows.clear()
        if session.finished:
            control.should_training_stop = True
        return control


class _Report(Callback):
    """Hands the rows of the session's log on."""

    def __init__(self, rows: list[Mapping[str, float]]) -> None:
        self._rows = rows

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Note the training metrics."""
        self._rows.append(metrics)

    def on_evaluate_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Note the evaluation metrics."""
        self._rows.append(metrics)


def _report_name(name: str) -> str:
    """Return a metric's name as transformers' reporters expect it."""
    return name.replace("eval/", "eval_", 1) if name.startswith("eval/") else name.removeprefix("train/")


class _Endless(IterableDataset[Any]):
    """A dataset without length, for a loop whose length the session decides."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield {}


class _Idle:
    """Stands where transformers keeps optimizer and scheduler; the session has its own."""

    def step(self) -> None:
        """Do nothing: the session has updated the weights."""
