"""`Trainer`: Lightning's own, with exact steps, exact resume, safe checkpoints, and policies as they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from etude.config.training import OptimizerConfiguration
from etude.engines.lightning.checkpoint import SafeCheckpointIO
from etude.engines.lightning.data import as_lightning, is_data_module, no_loaders
from etude.engines.lightning.exact import reopen_epoch
from etude.engines.lightning.interaction import PolicyDatasetInteraction
from etude.engines.lightning.loaders import Addressed, address
from etude.engines.lightning.module import LightningPolicy
from etude.errors import ConfigError, DataError, Interrupted, exits_refused
from etude.loop.optimizers import torch_optimizers
from etude.loop.signals import StopSignals

log = logging.getLogger("etude")

INTERRUPTED = "interrupted.ckpt"
"""The checkpoint that a signal leaves beside those of ModelCheckpoint; one name, so that there is one of them."""


class Trainer(lightning.Trainer):
    """Lightning's Trainer, which takes a plain policy or any LightningModule.

    Batches and random numbers follow from seed, step and sample, as in the loop: `fit(ckpt_path=...)` goes on bit for
    bit, and the numbers are those of the engines. Checkpoints are directories of safetensors and JSON, hashed and put
    in place by one rename. An update that is not finite is refused before it happens. SIGINT and SIGTERM save after the
    batch under way and exit with 130 and 143.

    Args:
        experiment_name: Output goes to `<default_root_dir>/<experiment_name>/version_N` instead of `lightning_logs`.
        accelerator: cpu, gpu, auto and the like.
        devices: How many devices, or which.
        precision: Such as 32-true, bf16-mixed or 16-mixed.
        max_epochs: Length of the run in epochs.
        gradient_clip_val: Largest gradient norm.
        logger: Where metrics go; True or None is TensorBoard, False nowhere.
        default_root_dir: Where output goes.
        num_sanity_val_steps: Validation batches to try before training.
        check_val_every_n_epoch: How often to validate.
        callbacks: Callbacks of Lightning's.
        seed: Root of all randomness; that of `lightning.seed_everything` unless given, else 0.
        optimizer: Optimizer of plain policies that have no `configure_optimizers`.
        options: Every other parameter of `lightning.Trainer`.
    """

    def __init__(
        self,
        *,
        experiment_name: str | None = None,
        accelerator: str | Any = "auto",
        devices: int | str | list[int] = "auto",
        precision: Any = None,
        max_epochs: int | None = None,
        gradient_clip_val: float | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        default_root_dir: str | Path = "experiments",
        num_sanity_val_steps: int | None = 0,
        check_val_every_n_epoch: int | None = 1,
        callbacks: list[lightning.Callback] | lightning.Callback | None = None,
        seed: int | None = None,
        optimizer: OptimizerConfiguration | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.addressed: list[Addressed] = []
        """The training loaders, which serve batches by place."""
        self.evaluated: list[Any] = []
        """The loaders that are being evaluated."""
        self.owes_validation = False
        """Whether a validation was due when the checkpoint was saved that training goes on from."""
        self.loads_checkpoint = False
        """Whether weights of a checkpoint are about to be loaded."""
        self.deals_out_batches = bool(options.get("use_distributed_sampler", True))
        self.agreed_signal = 0
        """The signal that all ranks stop for."""
        self._signals: StopSignals | None = None
        self._given_seed = seed
        self._saved_seed: int | None = None
        self._optimizer = _optimizer_of(optimizer)
        if experiment_name is not None:
            logger, default_root_dir = _name_output(experiment_name, logger, default_root_dir)
        super().__init__(
            accelerator=accelerator, devices=devices, precision=precision, max_epochs=max_epochs,
            gradient_clip_val=gradient_clip_val, logger=logger, default_root_dir=str(default_root_dir),
            num_sanity_val_steps=num_sanity_val_steps, check_val_every_n_epoch=check_val_every_n_epoch,
            callbacks=_with_ours(callbacks), **options,
        )  # fmt: skip
        strategy = self.strategy
        # Sharded strategies write their own format, from every rank.
        if (
            isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
            and type(strategy.checkpoint_io) is TorchCheckpointIO
        ):
            strategy.checkpoint_io = SafeCheckpointIO()
        # Processes that Lightning forks itself have signal handlers of their own, which are left to it.
        self._handles_signals = not isinstance(strategy.launcher, _MultiProcessingLauncher)
        if self._handles_signals:
            # Lightning's handler talks to the other ranks from inside the signal, and exits with 0.
            self._signal_connector._sigterm_notifier_fn = _ignore  # type: ignore[method-assign,assignment]

    # -- seeds --------------------------------------------------------------------------------------------------

    @property
    def root_seed(self) -> int:
        """The seed that all randomness of training follows from."""
        if self._given_seed is not None:
            return self._given_seed
        return self._saved_seed if self._saved_seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def resume_seed(self, seed: int) -> None:
        """Go on with the seed of a checkpoint, unless another was asked for."""
        if self._given_seed is not None and self._given_seed != seed:
            log.warning("resuming with seed %d instead of %d: not bit for bit", self._given_seed, seed)
        self._saved_seed = seed

    # -- signals ------------------------------------------------------------------------------------------------

    @property
    def stop_signal(self) -> int:
        """The signal that this process has received, or 0."""
        return self._signals.received if self._signals is not None else 0

    @property
    def received_sigterm(self) -> bool:
        """Whether to stop now; Lightning asks after each batch. A validation within training is finished first."""
        if not self._handles_signals:
            return super().received_sigterm
        fits = self.state.fn == TrainerFn.FITTING
        if self.world_size == 1 or not fits:  # else the ranks agree when they sum their weights
            self.agreed_signal = self.stop_signal
        return bool(self.agreed_signal) and (self.training or not fits)

    def save_interrupted(self) -> None:
        """Save where training stands, beside the checkpoints of ModelCheckpoint; without one nothing is saved."""
        directory = getattr(self.checkpoint_callback, "dirpath", None)
        if directory is None:
            return
        path = Path(directory) / INTERRUPTED
        self.save_checkpoint(path)
        log.warning("saved step %d as %s; go on with fit(..., ckpt_path=%r)", self.global_step, path, str(directory))

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Turn signals into `Interrupted`, which exits with 128 + signal, once what can be saved is saved."""
        if self._signals is not None or not self._handles_signals:  # within another call of ours, or Lightning's
            yield
            return
        with StopSignals() as self._signals:
            self.agreed_signal = 0
            try:
                yield
            except SIGTERMException:
                raise Interrupted(self.agreed_signal or self.stop_signal) from None
            else:
                if self.stop_signal:  # it came after the last batch: everything is done, but the caller must know
                    raise Interrupted(self.stop_signal)
            finally:
                self._signals = None

    # -- Lightning's calls, for policies and data modules as they are ----------------------------------------------

    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a policy or a LightningModule.

        Args:
            model: A plain policy, or a LightningModule.
            train_dataloaders: A loader, a collection of them, or a data module of any make.
            val_dataloaders: Loaders for validation.
            datamodule: A data module of any make.
            ckpt_path: A checkpoint to go on from exactly, a directory of checkpoints (its newest good one), or "last".
            weights_only: As Lightning takes it; checkpoints of this trainer are read without executing anything.
        """
        module = self._as_module(model)
        self.addressed, self.evaluated, self._saved_seed, self.owes_validation = [], [], None, False
        self.loads_checkpoint = ckpt_path is not None
        if ckpt_path is None and reopen_epoch(state := self.fit_loop.state_dict()):
            self.fit_loop.load_state_dict(state)
        if datamodule is None and is_data_module(train_dataloaders):
            datamodule, train_dataloaders = train_dataloaders, None
        datamodule = as_lightning(datamodule)
        if train_dataloaders is not None:
            train_dataloaders = self.address_loaders(train_dataloaders)
        lacks = isinstance(module, LightningPolicy) and val_dataloaders is None
        if lacks and datamodule is None:
            val_dataloaders = no_loaders()
        elif lacks and not is_overridden("val_dataloader", datamodule):
            datamodule.val_dataloader = no_loaders
        try:
            with exits_refused(lambda: f"step {self.global_step}, before its time"), self._stoppable():
                super().fit(module, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
        finally:
            if vars(datamodule or self).get("val_dataloader") is no_loaders:
                del datamodule.val_dataloader

    def _run_sanity_check(self) -> None:
        """Validate first if the checkpoint was saved between a batch and its validation, which Lightning leaves out."""
        super()._run_sanity_check()
        if self.owes_validation:
            self.owes_validation, self.validating = False, True
            self.fit_loop.epoch_loop.val_loop.restarting = False
            self.fit_loop.epoch_loop.val_loop.run()
            self.training = True

    def validate(self, model: nn.Module | None = None, dataloaders: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Measure the loss on validation data, and success in simulation; as Lightning's `validate`."""
        return self._evaluate("validate", model, dataloaders, args, kwargs)

    def test(self, model: nn.Module | None = None, dataloaders: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Measure the loss on test data, and success in simulation; as Lightning's `test`."""
        return self._evaluate("test", model, dataloaders, args, kwargs)

    def predict(self, model: nn.Module | None = None, dataloaders: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return what a policy plans for each batch; as Lightning's `predict`."""
        return self._evaluate("predict", model, dataloaders, args, kwargs)

    def _evaluate(self, verb: str, model: nn.Module | None, dataloaders: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what is found, unless there is no data to find it in, which Lightning passes over in silence."""
        if kwargs.get("datamodule") is None and is_data_module(dataloaders):
            kwargs["datamodule"], dataloaders = dataloaders, None
        if kwargs.get("datamodule") is not None:
            kwargs["datamodule"] = as_lightning(kwargs["datamodule"])
        self.evaluated = CombinedLoader(dataloaders, "sequential").flattened if dataloaders is not None else []
        self.loads_checkpoint = kwargs.get("ckpt_path") is not None
        module = None if model is None else self._as_module(model)
        with self._stoppable():
            found = getattr(super(), verb)(module, dataloaders, *args, **kwargs)
        split = "val" if verb == "validate" else verb
        batches = getattr(self, f"num_{split}_batches")
        if getattr(self, f"limit_{split}_batches") and not any(batches if isinstance(batches, list) else [batches]):
            wanted = f"{split}_dataloader()" + ("" if verb == "predict" else f" or {split}_env")
            raise DataError(f"there is nothing to {verb} on: give dataloaders, or a data module with {wanted}")
        return found

    def _as_module(self, model: nn.Module) -> Any:
        inner = getattr(model, "_orig_mod", model)  # a compiled one
        if isinstance(inner, lightning.LightningModule):
            return model
        if not isinstance(model, nn.Module):
            raise ConfigError(f"a model is a torch.nn.Module or a LightningModule, not a {type(model).__name__}")
        known = self.lightning_module
        if isinstance(known, LightningPolicy) and known.policy is model:
            return known
        return LightningPolicy(model, self._optimizer)

    def address_loaders(self, loaders: Any) -> CombinedLoader:
        """Serve training loaders by place from now on."""
        combined = address(loaders, self)
        for loader in self.addressed:
            if loader not in combined.flattened:
                loader.close()
        self.addressed = combined.flattened
        return combined


def _ignore(*_: Any) -> None:
    """Leave a signal to the handler that was there before."""


def _optimizer_of(given: OptimizerConfiguration | Mapping[str, Any] | None) -> OptimizerConfiguration:
    if isinstance(given, OptimizerConfiguration):
        config = given
    else:
        own = given is not None and given.get("type", "adamw") not in torch_optimizers()  # a rate of its own stands
        config = OptimizerConfiguration(**{**({} if own else {"lr": 1e-4}), **(given or {})})
    if "clip_norm" in config.model_fields_set or "match" in config.model_fields_set:
        raise ConfigError("optimizer: clip_norm and match do nothing here; clip with gradient_clip_val")
    return config


def _with_ours(callbacks: list[lightning.Callback] | lightning.Callback | None) -> list[lightning.Callback]:
    """Add our callback in front, once: a batch is seeded before anyone else sees it."""
    given = [callbacks] if isinstance(callbacks, lightning.Callback) else list(callbacks or [])
    return (
        given if any(isinstance(c, PolicyDatasetInteraction) for c in given) else [PolicyDatasetInteraction(), *given]
    )


def _name_output(name: str, logger: Any, root: str | Path) -> tuple[Any, str | Path]:
    """Return logger and root directory so that output goes to a directory of this name."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(f"experiment_name must be a plain name, got {name!r}; for another place use default_root_dir")
    if logger is None or logger is True:
        return TensorBoardLogger(str(root), name=name), root
    if logger is False:
        return False, Path(root) / name
    raise ConfigError("experiment_name names the default logger; give your own logger its name itself")
