"""The Lightning engine: Lightning's Trainer drives the loop, an Etude session makes each step."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.trainer import Trainer as LightningTrainer

from etude.errors import ConfigError
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import make_strategy
from etude.reading.suggest import did_you_mean
from etude.types import Result

if TYPE_CHECKING:
    from etude.trainer import Trainer

_LENGTH = "training.training_steps or training.duration says how long to train"
_EVALUATION = "training.evaluate_every and training.evaluate_batches say when and on what to evaluate"
_RANKS = "start several processes with torchrun"
CONFLICTS: Mapping[str, str] = {
    "accelerator": "training.device says where to train",
    "accumulate_grad_batches": "training.gradient_accumulation_steps says how many micro-batches make a step",
    "check_val_every_n_epoch": _EVALUATION,
    "default_root_dir": "run.root and run.name say where output goes",
    "devices": _RANKS,
    "enable_checkpointing": "training.save_every says when to save; the last step is always saved",
    "fast_dev_run": "try training.training_steps=1",
    "gradient_clip_algorithm": "training.clip_norm clips by norm",
    "gradient_clip_val": "training.clip_norm says how large a gradient may be",
    "limit_predict_batches": "nothing is predicted here",
    "limit_test_batches": "nothing is tested here",
    "limit_train_batches": _LENGTH,
    "limit_val_batches": _EVALUATION,
    "log_every_n_steps": "training.log_every says when to log",
    "max_epochs": _LENGTH,
    "max_steps": _LENGTH,
    "max_time": _LENGTH,
    "min_epochs": _LENGTH,
    "min_steps": _LENGTH,
    "num_nodes": _RANKS,
    "num_sanity_val_steps": _EVALUATION,
    "overfit_batches": "give a smaller dataset, and training.shuffle=false",
    "precision": "training.precision says how to calculate",
    "reload_dataloaders_every_n_epochs": "data is addressed by step and never reloaded",
    "strategy": _RANKS,
    "sync_batchnorm": "batch normalisation spans the ranks by itself",
    "use_distributed_sampler": "data is dealt out to the ranks by itself",
    "val_check_interval": _EVALUATION,
}
"""Parameters of Lightning's Trainer that would contradict the configuration, and what says it instead."""


class LightningEngine(LightningTrainer):
    """Let Lightning drive the loop, with its callbacks, loggers and profilers; every number is the torch engine's.

    Takes the parameters of `lightning.Trainer`, except those that the training section decides.
    """

    def __init__(self, **options: Any) -> None:
        check_options(options)
        given = options.pop("logger", None)
        self.forwarded: list[Logger] = [] if given in (None, False) else _as_loggers(given)
        """Loggers of Lightning's that get every row of metrics too."""
        self._shows_progress = bool(options.get("enable_progress_bar", False))
        plugins = options.pop("plugins", None) or []
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_autolog_hparams": False}
        with _quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GPU available but not used")  # the session uses it
            # The session moves policy and batches; each rank is one process to Lightning, whoever started it.
            fixed = {
                "accelerator": "cpu", "devices": 1, "max_epochs": -1, "enable_checkpointing": False,
                "logger": self.forwarded or False, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
                "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), LightningEnvironment()],
            }  # fmt: skip
            try:
                super().__init__(**{**quiet, **options, **fixed})
            except (ImportError, MisconfigurationException, TypeError, ValueError) as error:
                raise ConfigError(f"engine lightning: {' '.join(str(error).split())}") from error

    @property
    def received_sigterm(self) -> bool:
        """Say no: the session itself saves and ends when a signal comes."""
        return False

    def run(self, trainer: Trainer, resume: str | Path = "auto") -> Result:
        """Train to the requested length and return what came of it."""
        group = Group.join(trainer.config.device)
        strategy = make_strategy("auto", group, find_unused_parameters=False, sync_batch_norm=True)
        if self._shows_progress:
            trainer.show_progress = False
        if self.forwarded:
            trainer._loggers = [*trainer.loggers, *map(ForwardedLogger, self.forwarded)]
        with _quiet(), Session(trainer, group, strategy).running(resume) as session:
            if not session.finished:
                self.fit(SessionModule(session), Ticks())
            if not session.finished and self.should_stop:
                session.stopping = "stopped by a Lightning callback"
                session._wrap_up()
            return session.finish()


class SessionModule(lightning.LightningModule):
    """A module whose training step is a whole optimizer step of a session.

    For Lightning's callbacks: `session.policy` is what is trained, `session.progress` how far, `session.metrics` how.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.session = session

    def training_step(self, batch: int, batch_idx: int) -> dict[str, float]:
        """Take one optimizer step and whatever is due after it."""
        session = self.session
        session.take_step()
        self._count(session.progress.step)
        if session.finished:
            self.trainer.should_stop = True
        return {name: value for name, value in session.metrics.items() if name.startswith("train/")}

    def _count(self, steps: int) -> None:
        # Lightning counts steps of optimizers that it has wrapped; callbacks ask `trainer.global_step`.
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed = steps

    def on_train_start(self) -> None:
        """Start counting where a resumed run goes on."""
        self._count(self.session.progress.step)

    def configure_optimizers(self) -> Any:
        """Show the optimizers to Lightning's callbacks."""
        return [optimization.optimizer for optimization in self.session.optimizations.values()]


class Ticks:
    """A loader that never ends: the session knows how many steps there are, and where their data is."""

    def __iter__(self) -> Iterator[int]:
        return count()


class ForwardedLogger:
    """A logger of Lightning's among ours."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Hand on the configuration."""
        self.logger.log_hyperparams(dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on the metrics of one step."""
        self.logger.log_metrics(dict(metrics), step)

    def close(self) -> None:
        """Flush and end."""
        self.logger.finalize("success")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what Lightning's Trainer does not take, and what contradicts the training section."""
    known = [name for name in inspect.signature(lightning.Trainer.__init__).parameters if name != "self"]
    for name in options:
        where = f"engine.params.{name}"
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"{where}: lightning.Trainer has no such parameter{near}")
        if name in CONFLICTS:
            raise ConfigError(f"{where} cannot be set: {CONFLICTS[name]}")


def _as_loggers(given: Any) -> list[Logger]:
    listed = [given] if isinstance(given, Logger) else [] if given is True else list(given)
    if not listed or not all(isinstance(logger, Logger) for logger in listed):
        raise ConfigError("engine.params.logger takes loggers of Lightning's; for Etude's own use the loggers section")
    return listed


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from announcing devices and lengths that are not its own, and from warning of its own parts."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    # A profiler reports at INFO too, and whoever asked for one wants to read it.
    profiles = logging.getLogger("lightning.pytorch.profilers.profiler")
    profiles_level = profiles.level
    profiles.setLevel(min(profiles.getEffectiveLevel(), logging.INFO))
    log.setLevel(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
            yield
    finally:
        log.setLevel(level)
        profiles.setLevel(profiles_level)
