"""`ExactSteps`: transformers' loop with every optimizer step made exact, repeatable, and finite before it counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from etude.engines.huggingface.batches import NumberedBatches
from etude.engines.huggingface.checkpoints import SafeCheckpoints
from etude.engines.huggingface.losses import carries_weight, count_items, weigh
from etude.errors import Interrupted
from etude.loop import guard, provenance
from etude.loop.signals import StopSignals
from etude.loop.step import Meter
from etude.loop.weighing import Account
from etude.rng import STREAM_STEP, fold, seed_everything
from etude.types.protocols import Place

log = logging.getLogger("etude")


class ExactSteps(SafeCheckpoints):
    """A `transformers.Trainer` whose steps depend on nothing but weights, optimizer state, seed and step."""

    _batches: NumberedBatches
    _provenance: Mapping[str, Any]
    _account: Account | None = None
    _numbers = range(0)
    """The micro-batches of the step under way."""
    _correction = 1.0
    """What its gradients are to be multiplied by."""
    _stop_signal = 0
    _extra_logs: Mapping[str, float] = {}

    def _start(self, signals: StopSignals) -> None:
        """Forget what an earlier call of `train` has left."""
        self._signals = signals
        self._key = fold(self.args.seed, STREAM_STEP)
        self._meter = Meter()
        self._account, self._stop_signal, self._saved_at, self._extra_logs = None, 0, -1, {}
        self._names: dict[nn.Parameter, str] = {}

    # -- batches ------------------------------------------------------------------------------------------------

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Take the loader apart into numbered batches, and let transformers count steps and epochs from them."""
        self.close_batches()
        seed = args.data_seed if args.data_seed is not None else args.seed
        place = Place(
            seed, args.process_index, args.world_size, self._train_batch_size,
            num_workers=args.dataloader_num_workers, order_version=self._order_version,
        )  # fmt: skip
        self._batches = NumberedBatches(dataloader, place)
        self._provenance = (
            provenance.describe(dataloader, trainer=[type(self)], policy=map(type, self.module.modules()))
            if self.group.is_main else {}
        )  # fmt: skip
        return super().set_initial_training_values(args, self._batches)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        parent: Any = super()
        model, _ = parent._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        return model, self._batches

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule, over the optimizer itself where accelerate's wrapper does nothing but pass on.

        That is: without a loss scale. The wrapper also searches the disk for LOMO, twice a step, which takes 0.1 ms.
        """
        wrapped: Any = self.optimizer
        passes_on = type(wrapped).__name__ == "AcceleratedOptimizer" and wrapped.scaler is None
        if passes_on and self.args.device.type != "xla":
            self.optimizer = wrapped.optimizer
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Fetch the micro-batches of this step by their numbers; the iterator is not read."""
        accumulate, batches = self.args.gradient_accumulation_steps, self._batches
        self._numbers = batches.numbers(self.state.global_step, accumulate, num_batches)
        micros = batches.fetch(self._numbers)
        # The same on every rank, because DDP averages gradients before their weights are known.
        alone = self.args.world_size == 1
        self._account = Account(None if alone else float(batches.batch_length * accumulate), len(self._numbers))
        return micros, self._get_num_items_in_batch(micros, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        if batch_samples and not isinstance(batch_samples[0], Mapping):
            return None
        return super()._get_num_items_in_batch(batch_samples, device)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples in one epoch of a loader."""
        if isinstance(dataloader, NumberedBatches):
            return dataloader.num_samples
        samples: int = super().num_examples(dataloader)
        return samples

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of one optimizer step over all ranks."""
        samples: int = self._batches.batch_length * args.gradient_accumulation_steps * args.world_size
        return samples

    def close_batches(self) -> None:
        """Release the workers and files of the training data."""
        if hasattr(self, "_batches"):
            self._batches.close()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # transformers looks at the length only after a step
            return
        parent: Any = super()
        parent._run_epoch(*args, **kwargs)

    # -- one micro-batch ----------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Differentiate one micro-batch, weighed by what it sums over; the last one of a step closes it."""
        account, args = self._account, self.args
        assert account is not None
        place = len(account) * args.world_size + args.process_index
        seed_everything(fold(self._key, self.state.global_step, place))
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[union-attr]  # some optimizers average weights between modes
        items = count_items(inputs, self._loss_shifts_labels)  # before compute_loss, which may take the labels out
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            value, scaled = self.loss_of(model, inputs, num_items_in_batch)
        every = args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        share = weigh(value, inputs, items)
        scaled = scaled and not carries_weight(value)
        # Without its graph, which may go after backward.
        start = account.add(share.root.detach(), 1.0 if scaled else share.factor, share.weight, share.metrics)
        self.accelerator.backward(share.root if scaled or start == 1.0 else share.root * start)
        return self._close_step(account, scaled) if len(account) == account.count else share.root.new_zeros(())

    def loss_of(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> tuple[Any, bool]:
        """Return the loss of a batch, and whether it is divided by the weight of the whole step already."""
        raise NotImplementedError

    def _close_step(self, account: Account, scaled: bool) -> Tensor:
        """Sum over the ranks, stop if the loss is not finite, and return the mean loss of the step."""
        group = self.group
        account.read(self._meter, loss_name=None)
        (signals,) = account.sum(group, [float(self._signals.received)])
        if not account.is_finite:
            number, finding = account.first_bad() or (None, None)
            ids = [] if number is None else [self._batches.ids(self._numbers[number])]
            guard.stop(group, self.state.global_step, finding, ids)
        if signals:
            self._stop_signal = max(int(number) for number in group.gather(self._signals.received))
        self._correction = 1.0 if scaled else account.correction(group.world)
        mean = account.total / group.world if scaled else account.mean
        return torch.tensor(mean, dtype=torch.float32, device=self.args.device)

    # -- before the update --------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._finish_gradients(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self._finish_gradients(model, None) if grad_norm is None else grad_norm

    def _finish_gradients(self, model: nn.Module, limit: float | None) -> Tensor:
        """Give the gradients their true scale, refuse them if they are not finite, clip them, return their norm."""
        self.accelerator.unscale_gradients()
        params = [p for p in model.parameters() if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        if self._correction != 1.0:
            torch._foreach_mul_(grads, self._correction)
        norm = get_total_norm(grads)
        if not math.isfinite(norm.item()):
            self._refuse(params)
        elif limit:
            clip_grads_with_norm_(params, limit, norm)
        return norm

    def _refuse(self, params: Sequence[nn.Parameter]) -> None:
        """Stop before the update, unless a loss scale that can still be lowered explains an overflow."""
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and scaler.is_enabled() and scaler.get_scale() * scaler.get_backoff_factor() >= 1.0:
            return  # the scaler skips this step and lowers the scale
        if not self._names:
            self._names = {parameter: name for name, parameter in self.module.named_parameters()}
        ids = [self._batches.ids(number) for number in self._numbers]
        finding = guard.check_gradients(self._names, params) or "gradient norm not finite"
        guard.stop(self.group, self.state.global_step, finding, ids)

    # -- after the update ---------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, trial: Any, *rest: Any, **named: Any
    ) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._extra_logs = self._meter.read(self.group)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *rest, **named)
        if self._stop_signal:
            if self.args.save_strategy != SaveStrategy.NO and self._saved_at != self.state.global_step:
                self._save_checkpoint(model, trial)
            raise Interrupted(self._stop_signal)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the metrics of the losses beside the loss."""
        if "loss" in logs:
            logs, self._extra_logs = {**logs, **self._extra_logs}, {}
        super().log(logs, start_time)

    def _collect(self) -> dict[str, Any]:
        window: dict[str, Any] = {"loss": self._tr_loss.item(), "logged_at": self._globalstep_last_logged}
        window["meters"] = self.group.gather(self._meter.state_dict())
        return {**super()._collect(), "window": window, "place": self._place(), "provenance": self._provenance}

    def _place(self) -> dict[str, int]:
        """Return what decides, with the step, which samples and random numbers come next."""
        return {"seed": self._batches.seed, "global_batch": self.get_total_train_batch_size(self.args)}

    def _resume_window(self) -> None:
        """Go on with the means that were under way, so that a resumed run logs the same numbers."""
        if self._resumed is None or "window" not in self._resumed.tree:
            return
        saved, window = self._resumed.tree["place"], self._resumed.tree["window"]
        changed = [f"{name} {saved[name]} -> {value}" for name, value in self._place().items() if saved[name] != value]
        if changed and self.group.is_main:
            log.warning("resuming with %s: training goes on, but not bit for bit as it would have", ", ".join(changed))
        provenance.say_changes(self._resumed.tree.get("provenance"), self._provenance)
        self._tr_loss += window["loss"]
        self._globalstep_last_logged = window["logged_at"]
        meters, rank = window["meters"], self.group.rank
        if rank < len(meters):
            self._meter.load_state_dict(meters[rank])
