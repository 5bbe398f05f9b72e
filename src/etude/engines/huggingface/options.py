"""Which `TrainingArguments` the engine `huggingface` passes on, and why it refuses the others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean

PASSED = frozenset(
    {
        "ddp_find_unused_parameters", "debug", "disable_tqdm", "full_determinism", "gradient_checkpointing",
        "gradient_checkpointing_kwargs", "liger_kernel_config", "log_level", "log_level_replica", "log_on_each_node",
        "neftune_noise_alpha", "project", "report_to", "run_name", "skip_memory_metrics", "tf32", "trackio_bucket_id",
        "trackio_space_id", "trackio_static_space_id", "use_cache", "use_liger_kernel",
    }
)  # fmt: skip
"""Options that act on the model, the process or the reports, and so mean the same as in transformers."""

OWNED = {
    "accelerator_config": "engine: torch", "adam_beta1": "training.optimizer_params.betas",
    "adam_beta2": "training.optimizer_params.betas", "adam_epsilon": "training.optimizer_params.eps",
    "bf16": "training.precision: bf16", "data_seed": "training.seed",
    "dataloader_drop_last": "a DataLoader with drop_last as data", "dataloader_num_workers": "training.num_workers",
    "dataloader_prefetch_factor": "a DataLoader with prefetch_factor as data",
    "deepspeed": "engine: {type: torch, params: {strategy: fsdp}}", "eval_steps": "training.evaluate_every",
    "eval_strategy": "training.evaluate_every", "fp16": "training.precision: fp16",
    "fsdp": "engine: {type: torch, params: {strategy: fsdp}}", "fsdp_config": "engine: {type: torch}",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "greater_is_better": "training.best_mode", "learning_rate": "training.lr",
    "load_best_model_at_end": "the run's checkpoints/best", "logging_steps": "training.log_every",
    "logging_strategy": "training.log_every", "lr_scheduler_kwargs": "training.min_lr_ratio",
    "lr_scheduler_type": "training.schedule", "max_grad_norm": "training.clip_norm",
    "max_steps": "training.training_steps", "metric_for_best_model": "training.best_metric",
    "num_train_epochs": "training.duration: 3 epochs", "optim": "training.optimizer",
    "optim_args": "training.optimizer_params", "output_dir": "run.root and run.name",
    "per_device_eval_batch_size": "training.batch_size", "per_device_train_batch_size": "training.batch_size",
    "resume_from_checkpoint": "etude train --resume", "save_steps": "training.save_every",
    "save_strategy": "training.save_every", "save_total_limit": "training.keep_last", "seed": "training.seed",
    "torch_compile": "training.compile", "torch_compile_backend": "training.compile",
    "torch_compile_mode": "training.compile", "train_sampling_strategy": "training.shuffle",
    "use_cpu": "training.device: cpu", "warmup_steps": "training.warmup_steps",
    "weight_decay": "training.weight_decay",
}  # fmt: skip
"""Options that Etude's own configuration decides, and where."""


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options if every one of them can be passed on; say what to do about the first that cannot."""
    known = inspect.signature(TrainingArguments).parameters
    for name in options:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"engine huggingface: TrainingArguments has no option {name!r}{near}")
        if name in OWNED:
            raise ConfigError(
                f"engine huggingface: {name!r} is not set here but by {OWNED[name]}, so that every engine trains alike"
            )
        if name not in PASSED:
            raise ConfigError(
                f"engine huggingface: {name!r} has no effect where Etude makes the step; leave it out, or train with "
                "etude.engines.huggingface.BaseTrainer"
            )
    return dict(options)
