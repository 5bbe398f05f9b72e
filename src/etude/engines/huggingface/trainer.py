"""`BaseTrainer`: `transformers.Trainer` with ready-made loaders and the promises that it does not keep by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import TrainOutput

from etude.data.coerce import as_data
from etude.data.histories import choose_windows
from etude.engines.huggingface.batches import EvaluationBatches, ready_made
from etude.engines.huggingface.checkpoints import is_transformers_model
from etude.engines.huggingface.losses import (
    accepts,
    count_items,
    mean_of,
    predictions_of,
    split_outputs,
    takes_anything,
    takes_batch,
    weigh,
)
from etude.engines.huggingface.steps import ExactSteps
from etude.errors import ConfigError, DataError, EtudeError, Interrupted, ShortRunError, exits_refused
from etude.loop.locking import locked
from etude.loop.signals import StopSignals
from etude.low_precision import require_low_precision, require_low_precision_of
from etude.rng import STREAM_EVALUATE, STREAM_INIT, fold, seed_everything

log = logging.getLogger("etude")

_REFUSED = {
    "deepspeed": "DeepSpeed updates weights before anything can be checked; use the torch engine with strategy: fsdp",
    "fsdp": "checkpoints of shards are not verified here; use the torch engine with strategy: fsdp",
    "parallelism_config": "checkpoints of shards are not verified here; use the torch engine",
    "ignore_data_skip": "resuming skips no data, so there is nothing to ignore; leave it out",
    "enable_jit_checkpoint": "SIGTERM saves and stops already; leave it out",
}

_NEEDS = {
    "gradient_checkpointing": "gradient_checkpointing_enable",
    "label_smoothing_factor": "config",
    "neftune_noise_alpha": "get_input_embeddings",
}
"""Options that ask something of the model which only those of transformers are sure to have."""


class BaseTrainer(ExactSteps):
    """Train like `transformers.Trainer`, exactly: subclass it and override `compute_loss`.

    Beyond transformers: any split of a batch gives the same update; resuming is exact at any step, with augmentation
    and dropout; checkpoints are verified and a damaged one is replaced by the one before; a loss or gradient that is
    not finite stops training before it changes a weight.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        train_loader: Any = None,
        eval_loader: Any = None,
        **options: Any,
    ) -> None:
        """Make a trainer; every argument of `transformers.Trainer` is accepted too.

        Args:
            model: What is trained: a policy, a transformers model, or any module. One that takes its shapes from the
                data is built now.
            args: The `TrainingArguments`.
            positional: Further arguments of `transformers.Trainer`, in its order.
            train_loader: A ready-made loader: a DataLoader, a list of batches, or any other iterable of batches. It
                keeps its batches, order and workers; ranks take turns, so it must not shard.
            eval_loader: A ready-made loader for evaluation, or a dictionary of them by name.
            options: Further arguments of `transformers.Trainer` by name.
        """
        self.train_loader, self.eval_loader = train_loader, eval_loader
        if train_loader is not None and options.get("train_dataset") is not None:
            raise ConfigError("give train_loader or train_dataset, not both")
        if eval_loader is not None:
            if options.get("eval_dataset") is not None:
                raise ConfigError("give eval_loader or eval_dataset, not both")
            # transformers refuses to evaluate without a dataset, though it only ever asks for a loader.
            options["eval_dataset"] = getattr(eval_loader, "dataset", eval_loader)
        for name, given in (("train_loader", train_loader), ("eval_loader", eval_loader)):
            for loader in given.values() if name == "eval_loader" and isinstance(given, dict) else [given]:
                if loader is not None and not isinstance(loader, DataLoader):
                    ready_made(loader, name)
        if args is not None:
            _refuse_options(args, train_loader)
            _refuse_for_model(args, model)
        _build(model, train_loader, options.get("train_dataset"), args)
        super().__init__(model, args, *positional, **options)
        if self.model is not None:
            require_low_precision_of(self.model)
        self._is_transformers = is_transformers_model(self.model)
        if not self._is_transformers and not hasattr(self.model, "accepts_loss_kwargs"):
            # transformers takes any forward(**batch) for one that wants the number of items too.
            self.model_accepts_loss_kwargs = False
        self._is_custom = type(self).compute_loss is not BaseTrainer.compute_loss
        self._takes_batch: bool | None = None
        self._takes_items = accepts(type(self).compute_loss, "num_items_in_batch")
        self._takes_outputs = accepts(type(self).compute_loss, "return_outputs")
        self._measured: list[tuple[float, float]] = []
        self.add_callback(_OnBegin(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; let fp16 mean fp16 on a CPU too, where accelerate drops it without a word."""
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        given = self.args
        if given.bf16 or given.fp16 or given.bf16_full_eval or given.fp16_full_eval:
            require_low_precision("bf16" if given.bf16 or given.bf16_full_eval else "fp16", accelerator.device)
        if self.args.fp16 and accelerator.device.type == "cpu":
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu")

    # -- data ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the ready-made loader, or one made of `train_dataset`. It is not sharded; ranks take turns."""
        if self.train_loader is not None:
            return self.train_loader
        if self.train_dataset is None:
            raise ConfigError("nothing to train on: give train_loader or train_dataset")
        dataset, args = self.train_dataset, self.args
        collate = self.data_collator
        if hasattr(dataset, "column_names"):  # of the datasets library
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        options: dict[str, Any] = {
            "batch_size": self._train_batch_size,
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if not isinstance(dataset, IterableDataset):
            options |= {"sampler": self._get_train_sampler(dataset), "drop_last": args.dataloader_drop_last}
        return DataLoader(dataset, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a ready-made loader for evaluation, sharded over the ranks, or one made of a dataset."""
        loader = self.eval_loader
        if loader is None or (eval_dataset is not None and eval_dataset is not getattr(loader, "dataset", loader)):
            named = isinstance(eval_dataset, str) and isinstance(loader, dict)
            loader = loader[eval_dataset] if named else eval_dataset
            if not named and not isinstance(loader, DataLoader):
                return super().get_eval_dataloader(eval_dataset)
        return self._evaluated(loader)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a ready-made loader to predict from, sharded over the ranks, or one made of a dataset."""
        is_loader = isinstance(test_dataset, DataLoader)
        return self._evaluated(test_dataset) if is_loader else super().get_test_dataloader(test_dataset)

    def _evaluated(self, loader: Any) -> Any:
        # Anew each time: a prepared loader counts its passes, and shuffles each differently.
        if isinstance(loader, DataLoader):
            return self.accelerator.prepare(loader)
        return EvaluationBatches(ready_made(loader, "eval_loader"), self.args.seed)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return dataset if self._takes_any_column() else super()._remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        if self._takes_any_column():
            return data_collator
        return super()._get_collator_with_removed_columns(data_collator, description)

    def _takes_any_column(self) -> bool:
        return not self._is_transformers and takes_anything(self.module)

    # -- losses -------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean loss of a batch; override this to change the objective.

        May return a mean, which counts as often as the batch has labels or samples, or say what it counts itself: an
        `etude.Loss`, or a dictionary with `loss` and `weight`. `num_items_in_batch` may be left out of an override.
        """
        if self._asks_transformers():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = self._call(model, inputs)
        loss = mean_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> tuple[Any, bool]:
        """Return the loss of a batch, and whether it is divided by the weight of the whole step already."""
        if not self._is_custom and not self._asks_transformers():
            # The whole output, not only its mean: a policy may say what its loss sums over.
            return self._call(model, inputs), False
        if not self._takes_items:
            return self.compute_loss(model, inputs), False
        scaled = items is not None if self.loss_is_scaled_for_ga is None else self.loss_is_scaled_for_ga
        return self.compute_loss(model, inputs, num_items_in_batch=items), bool(scaled)

    def _call(self, model: nn.Module, inputs: Any) -> Any:
        if self._takes_batch is None:  # reading a signature takes as long as a small step
            self._takes_batch = takes_batch(self.module, inputs)
        return model(inputs) if self._takes_batch else model(**inputs)

    def _asks_transformers(self) -> bool:
        custom = self.compute_loss_func is not None or self.label_smoother is not None
        return custom or self._is_transformers or bool(self.model_accepts_loss_kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, outputs and labels of a batch; the loss needs no labels, as it does in transformers."""
        if not self._is_custom and self._asks_transformers():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs[name] for name in self.label_names if isinstance(inputs, Mapping) and name in inputs)
        asked: dict[str, Any] = {"return_outputs": True} if self._takes_outputs else {}
        if self._is_custom and self._takes_items:
            asked["num_items_in_batch"] = self._get_num_items_in_batch([inputs], self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            items = count_items(inputs, self._loss_shifts_labels)
            if self._is_custom:
                value, outputs = split_outputs(self.compute_loss(model, inputs, **asked))
            else:  # whole, as in training: it may say what its loss sums over
                value = outputs = self._call(model, inputs)
            share = weigh(value, inputs, items)
        self._measured.append((share.root.item() * share.factor, share.weight))
        loss = share.mean.detach()
        if prediction_loss_only:
            return loss, None, None
        return loss, _single(predictions_of(outputs, ignore_keys or [])), _single(labels)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict; the mean loss is over everything that its batches sum over.

        transformers counts every batch as one of `per_device_eval_batch_size`. Over several ranks it stays that way,
        because only transformers knows which samples it has repeated to keep the ranks in step.
        """
        self._measured = []
        output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        total, weight = (math.fsum(numbers) for numbers in zip(*self._measured or [(0.0, 0.0)], strict=True))
        prefix = kwargs.get("metric_key_prefix", "eval")
        if self.args.world_size == 1 and weight and f"{prefix}_loss" in output.metrics:
            output.metrics[f"{prefix}_loss"] = total / weight
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on a random stream of its own, so that the same weights always measure the same."""
        seed_everything(fold(self.args.seed, STREAM_EVALUATE, self.args.process_index))
        found: dict[str, float] = super().evaluate(*args, **kwargs)
        return found

    # -- running ------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the requested length; True goes on from the newest checkpoint that is whole.

        SIGINT, SIGTERM and SIGHUP save after the step under way and exit with 130, 143 and 129.
        """
        with StopSignals() as signals, locked(self.group, self.output_dir), exits_refused(self._reached):
            self._start(signals)
            checkpoint = self.choose_checkpoint(resume_from_checkpoint)
            try:
                output = super().train(checkpoint, trial, ignore_keys_for_eval)
                self.require_finite({})
            except (EtudeError, Interrupted):
                # Reporters close their files here; what was logged so far is what explains the stop.
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                raise
            finally:
                self.close_batches()
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            raise ShortRunError(
                f"training ended at step {self.state.global_step}, before the requested {self.state.max_steps} steps"
            )
        return output

    def _reached(self) -> str:
        return f"step {self.state.global_step}, before the requested {self.state.max_steps} steps"


class _OnBegin(TrainerCallback):
    """Takes up the means of a resumed run once transformers has set them to zero."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Go on where the checkpoint was made."""
        self._trainer._resume_window()


def _refuse_options(args: TrainingArguments, train_loader: Any) -> None:
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments.{name} cannot be used with BaseTrainer: {reason}")
    if "lomo" in str(args.optim).lower():
        raise ConfigError(f"optim={args.optim!s} updates weights while it differentiates, so nothing can be checked")
    if args.train_sampling_strategy == "batch_rebalance":
        raise ConfigError("train_sampling_strategy='batch_rebalance' shards by itself; use 'group_by_length'")
    if train_loader is not None and args.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size cannot change a ready-made train_loader; give train_dataset instead")


def _refuse_for_model(args: TrainingArguments, model: nn.Module | None) -> None:
    for name, method in _NEEDS.items():
        if model is not None and getattr(args, name, None) and not hasattr(model, method):
            kind = type(model).__name__
            raise ConfigError(
                f"TrainingArguments.{name} needs a model with {method}, which {kind} has not; leave it out"
            )


def _build(model: nn.Module | None, loader: Any, dataset: Any, args: TrainingArguments | None) -> None:
    """Build a policy that takes its shapes from the data, and let windowed data take its windows from the policy."""
    if model is None:
        return
    source = loader if loader is not None else dataset
    choose_windows(model, getattr(source, "dataset", source))
    if getattr(model, "is_built", True) is not False:
        return
    spec = None if source is None else (as_data(source) if loader is None else ready_made(loader)).spec
    if spec is None and getattr(model, "needs_spec", True):
        raise DataError("the policy takes its shapes from the data, but the data has no spec; build the policy first")
    seed_everything(fold(args.seed if args is not None else transformers.TrainingArguments.seed, STREAM_INIT))
    model.build(spec)  # type: ignore[operator]


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values or None
