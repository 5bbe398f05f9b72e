"""What makes a step of Lightning's a function of its place, its update exact, and a non-finite update impossible."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from etude.engines.lightning.checkpoint import SAVED
from etude.engines.lightning.codec import encode
from etude.loop import guard, provenance
from etude.loop.distributed import Group
from etude.loop.locking import locked
from etude.loop.sharding import local_tensor
from etude.low_precision import require_low_precision
from etude.policies.base import specs_of
from etude.rng import STREAM_EVALUATE, STREAM_STEP, fold, seed_everything
from etude.types import Loss, split_loss

log = logging.getLogger("etude")

DRAWS = 2
"""How random numbers are drawn: by (step, place) and by sample as in the loop; 1 drew by epoch and batch."""


class ExactStepsCallback(lightning.Callback):
    """Seeds every batch by its place, divides by true weights, and stops before an update that is not finite.

    A `training_step` may return a `Loss`: its sum is then divided by the weight of everything that the optimizer step
    sees, over micro-batches and ranks. A plain mean stays as Lightning treats it.
    """

    def __init__(self) -> None:
        self._weights: list[Any] = []
        self._losses: list[Tensor] = []
        self._step, self._micro, self._place = -1, 0, (0, 0)
        """The optimizer step under way, which of its micro-batches, and that one's epoch and number."""
        self._nominal = 1.0
        self._partial: dict[str, Any] | None = None
        self._names: dict[Any, str] = {}
        self._odd: frozenset[str] = frozenset()
        self._locks = ExitStack()
        """Directories that no other training may write meanwhile."""
        self._provenance: dict[str, Any] = {}
        self._provenance_before: Any = None
        self._clips = False
        """Whether gradients are looked at when they are clipped, which needs their norm anyway."""
        self.takes_part = False
        """Whether the trainer is ours, which serves batches by place."""

    # -- life ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let `training_step` return a Loss: the Tuner trains before `on_fit_start`. Check what is asked of the CPU."""
        require_low_precision(trainer.precision, trainer.strategy.root_device)
        self.takes_part = hasattr(trainer, "addressed")
        step: Any = getattr(pl_module, "training_step", None)
        wraps = self.takes_part and stage == "fit" and pl_module.automatic_optimization
        if wraps and not hasattr(step, "returns_losses"):

            @functools.wraps(step)
            def training_step(*args: Any, **kwargs: Any) -> Any:
                return self._weigh(trainer, step(*args, **kwargs), args[0] if args else kwargs.get("batch"))

            training_step.returns_losses = True  # type: ignore[attr-defined]
            pl_module.training_step = training_step

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with nothing accumulated."""
        self._weights, self._losses, self._step = [], [], -1
        self._odd = guard.odd_from_the_start(pl_module)
        if self.takes_part:
            self._locks.close()  # of a fit that ended without a word, as trials of the Tuner do
            self._locks.enter_context(locked(self._group(trainer), *_written_by(trainer)))
        self._clips = self.takes_part and self._guard_clipping(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to end with weights that the last update has broken."""
        if self.takes_part:
            self._require_finite(trainer, {"state_dict": pl_module.state_dict()})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take up gradients that were saved in the middle of an accumulation."""
        if not self.takes_part:
            return
        self._names = {parameter: name for name, parameter in pl_module.named_parameters()}
        _finish_epoch(trainer)
        self._note_provenance(trainer, pl_module)
        sizes = [loader.batch_size for loader in trainer.addressed if loader.batch_size]
        self._nominal = float(sizes[0]) if sizes else 1.0
        if self._partial is None:
            return
        for name, parameter in pl_module.named_parameters():
            if name in self._partial["gradients"]:
                parameter.grad = self._partial["gradients"][name].to(parameter.device)
        self._weights = list(self._partial["weights"])
        self._step, self._micro = trainer.global_step, len(self._partial["window"]) - 1
        self._partial = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave everything as it was."""
        self.restore(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save where a signal has stopped training between two batches, and leave everything as it was."""
        if self.takes_part and isinstance(exception, SIGTERMException) and trainer.state.fn == TrainerFn.FITTING:
            trainer.save_interrupted()
        self.restore(trainer, pl_module)

    def on_predict_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Stop for a signal; Lightning asks everywhere but here."""
        if trainer.received_sigterm:
            raise SIGTERMException

    def restore(self, trainer: Any, pl_module: Any) -> None:
        """Leave the module as it was."""
        self._locks.close()
        if hasattr(vars(pl_module).get("training_step"), "returns_losses"):
            del pl_module.training_step
        vars(trainer.precision_plugin).pop("clip_grad_by_norm", None)

    def _note_provenance(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            data = next(iter(trainer.addressed), None)
            self._provenance = provenance.describe(data, policy=map(type, pl_module.modules()))
            provenance.say_changes(self._provenance_before, self._provenance)
        self._provenance_before = None

    # -- seeds --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Seed the generators as the loop does: by step and place in the global batch."""
        if not self.takes_part:
            return
        self._micro = self._micro + 1 if trainer.global_step == self._step else 0
        self._step, self._place = trainer.global_step, (trainer.fit_loop.epoch_progress.current.processed, batch_idx)
        place = self._micro * trainer.world_size + trainer.global_rank
        seed_everything(fold(fold(trainer.root_seed, STREAM_STEP), self._step, place))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Evaluate on a random stream of its own."""
        self._seed_evaluation(trainer, dataloader_idx, batch_idx, trainer.global_rank)

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Test on a random stream of its own."""
        self._seed_evaluation(trainer, dataloader_idx, batch_idx, trainer.global_rank, 1)

    def _seed_evaluation(self, trainer: Any, *place: int) -> None:
        if self.takes_part:
            seed_everything(fold(trainer.root_seed, STREAM_EVALUATE, *place))

    # -- weights ------------------------------------------------------------------------------------------------

    def _weigh(self, trainer: Any, output: Any, batch: Any) -> Any:
        """Turn a Loss into the tensor that Lightning differentiates, and remember its weight."""
        inner = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(inner, Loss):
            return output
        total, _, weight, _ = split_loss(inner, batch)
        alone = trainer.accumulate_grad_batches == 1 and trainer.world_size == 1
        if alone or self not in trainer.callbacks:  # the Tuner trains without callbacks
            scaled = total / weight if float(weight) else total * 0.0
        else:
            self._weights.append(float(weight))
            # Lightning divides by the number of micro-batches; the true weight is known only after the last of them.
            scaled = total * (trainer.accumulate_grad_batches / self._nominal)
        return {**output, "loss": scaled} if isinstance(output, Mapping) else scaled

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Remember the loss; it is read once all micro-batches are through."""
        if self.takes_part:
            self._losses.append(loss.detach())

    # -- update -------------------------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Divide the gradients by the weight of the whole step, and stop if anything is not finite."""
        if not self.takes_part:
            return
        params = [p for group in optimizer.param_groups for p in group["params"]]
        looks = not self._clips or bool(self._weights)
        grads = [local_tensor(p.grad) for p in params if p.grad is not None] if looks else []
        lost = math.fsum(value.item() for value in self._losses) if len(self._losses) > 1 else _only(self._losses)
        weight, weighs = math.fsum(self._weights), bool(self._weights)
        bad = [float(not math.isfinite(number)) for number in (lost + weight, _size(grads))]
        if trainer.world_size > 1:
            weight, *bad, signals = self._group(trainer).sum([weight, *bad, float(trainer.stop_signal)])
            if signals:
                trainer.agreed_signal = max(map(int, self._group(trainer).gather(trainer.stop_signal)))
        if any(bad) and not _may_overflow(trainer):
            # A bad loss has spoiled the gradients of every rank by now: only its own rank is to blame.
            self._stop(trainer, [] if bad[0] else params)
        if weighs and grads:
            torch._foreach_mul_(grads, self._nominal * trainer.world_size / weight if weight else 0.0)
        self._weights, self._losses = [], []

    def _guard_clipping(self, trainer: Any, pl_module: Any) -> bool:
        """Look at gradients where Lightning clips them by norm; tell whether it will."""
        plugin = trainer.precision_plugin
        by_norm = trainer.gradient_clip_val and trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
        own = is_overridden("configure_gradient_clipping", pl_module) or not pl_module.automatic_optimization
        if not by_norm or own or type(plugin).clip_grad_by_norm is not Precision.clip_grad_by_norm:
            return False

        def clip(optimizer: Optimizer, clip_val: float) -> None:
            params = list(plugin.main_params(optimizer))
            norm = get_total_norm([p.grad for p in params if p.grad is not None])
            if not math.isfinite(norm.item()) and not _may_overflow(trainer):
                self._stop(trainer, params)
            clip_grads_with_norm_(params, clip_val, norm)

        plugin.clip_grad_by_norm = clip
        return True

    def _stop(self, trainer: Any, params: list[Any]) -> None:
        losses = [value.item() for value in self._losses]
        finding = guard.check_losses(losses) or guard.check_gradients(self._names, params)
        ids = [sample for loader in trainer.addressed for place in self._window() for sample in loader.ids(*place)]
        guard.stop(self._group(trainer), trainer.global_step, finding, ids)

    def _window(self) -> list[tuple[int, int]]:
        """Return epoch and number of the batches since the last update."""
        epoch, number = self._place
        return [(epoch, one) for one in range(max(0, number - self._micro), number + 1)]

    @staticmethod
    def _group(trainer: Any) -> Group:
        return Group(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the seed, and gradients if the checkpoint falls into the middle of an accumulation."""
        if not self.takes_part:
            return
        self._require_finite(trainer, checkpoint)
        saved: dict[str, Any] = {"seed": trainer.root_seed, "world": trainer.world_size, "specs": specs_of(pl_module)}
        saved |= {"provenance": self._provenance, "draws": DRAWS, "owes_validation": _owes_validation(trainer)}
        if pl_module.automatic_optimization and trainer.global_step == self._step:
            if trainer.world_size > 1:
                log.warning("saved in the middle of an accumulation over several ranks: a resume from here is inexact")
            saved["partial"] = {
                "gradients": {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None},
                "weights": self._weights,
                "window": [list(place) for place in self._window()],
            }
        checkpoint[SAVED] = saved

    def _require_finite(self, trainer: Any, checkpoint: Mapping[str, Any]) -> None:
        tree = {"policy": checkpoint["state_dict"], "optimizer": encode(checkpoint.get("optimizer_states", []))}
        last = getattr(trainer.checkpoint_callback, "best_model_path", None)
        guard.require_finite(self._group(trainer), trainer.global_step, tree, self._odd, last)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take up the seed unless another was asked for, and say what cannot be exact."""
        if not self.takes_part:
            return
        reopen_epoch(checkpoint.get("loops", {}).get("fit_loop"))
        saved = checkpoint.get(SAVED)
        if saved is None:
            log.warning("the checkpoint was not written by Etude: training goes on, but not as it would have")
            return
        trainer.resume_seed(saved["seed"])
        trainer.owes_validation = bool(saved.get("owes_validation"))
        if saved.get("draws", 1) != DRAWS:
            log.warning(
                "the checkpoint is of an Etude that drew dropout and augmentation by epoch and batch, not by step "
                "and sample: training goes on with the same samples in the same order, but not bit for bit"
            )
        if saved["world"] != trainer.world_size:
            log.warning("resuming with %d ranks instead of %d: not bit for bit", trainer.world_size, saved["world"])
        self._partial = saved.get("partial")
        self._provenance_before = saved.get("provenance")


def _owes_validation(trainer: Any) -> bool:
    """Tell whether a batch has ended and the validation that is due after it has not begun."""
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress.current
    ended = trainer.training and batches.completed < batches.processed
    return bool(ended and loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def reopen_epoch(loop: dict[str, Any] | None) -> bool:
    """Go on inside an epoch that `max_steps`, `max_time` or an early stop has ended before its last batch.

    Lightning counts such an epoch as processed, and would begin the next one. Changes the state of its training loop
    and tells whether there was such an epoch.
    """
    if loop is None:
        return False
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    within = batches["current"]
    if batches["is_last_batch"] or not within["ready"] or within["ready"] != within["completed"]:
        return False
    if not epochs["total"]["processed"] == epochs["total"]["started"] == epochs["total"]["ready"]:
        return False
    for counts in (epochs["total"], epochs["current"]):
        counts["processed"] = counts["completed"] = counts["ready"] - 1
    return True


def _finish_epoch(trainer: Any) -> None:
    """Begin the next epoch at its first batch when a checkpoint was saved after the last batch of a stream.

    Lightning does so only for loaders that have a length, and would go on counting where the last epoch ended.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    if loop.restarted_on_train_batch_end and progress.is_last_batch and trainer.num_training_batches == math.inf:
        progress.is_last_batch = False
        progress.current.completed = -1  # Lightning is about to count the last batch as completed


def _size(grads: list[Tensor]) -> float:
    """Return a number that is finite if and only if every gradient is."""
    if not grads:
        return 0.0
    norms = torch._foreach_norm(grads)
    if grads[0].device.type == "cpu":
        return math.fsum(norm.item() for norm in norms)  # on a CPU reading is cheaper than another kernel
    return float(torch.stack(norms).sum())


def _only(losses: list[Tensor]) -> float:
    return float(losses[0]) if losses else 0.0


def _may_overflow(trainer: Any) -> bool:
    """Tell whether a loss scale will skip the update and try a smaller one; below 1 the numbers are at fault."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.get_scale() >= 1.0


def _written_by(trainer: Any) -> list[Path]:
    """Return the directories that checkpoints of a fit go to: known once ModelCheckpoint is set up."""
    found = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    return [] if trainer.fast_dev_run else [Path(path) for path in dict.fromkeys(found) if path]
