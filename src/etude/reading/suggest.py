"""Name what may have been meant by a word that is not known."""

from __future__ import annotations

from collections.abc import Iterable

OTHER_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "learningrate", "rate", "eta", "alpha"), ("lr",)),
    **dict.fromkeys(("max_steps", "steps", "num_steps", "total_steps", "iterations"), ("training_steps",)),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "num_train_epochs", "epoch"), ("duration",)),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "bs"), ("batch_size",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val", "clip"), ("clip_norm",)),
    **dict.fromkeys(("accumulate_grad_batches", "accumulation_steps"), ("gradient_accumulation_steps",)),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), ("schedule",)),
    **dict.fromkeys(("eval_every", "eval_steps", "val_check_interval"), ("evaluate_every",)),
    **dict.fromkeys(("save_steps", "checkpoint_every", "save_interval"), ("save_every",)),
    **dict.fromkeys(("logging_steps", "log_every_n_steps", "log_interval"), ("log_every",)),
    **dict.fromkeys(("amp", "dtype", "mixed_precision", "bf16", "fp16"), ("precision",)),
    **dict.fromkeys(("num_generations", "num_completions", "n_samples"), ("group_size",)),
    **dict.fromkeys(("max_completion_length", "max_tokens", "response_length"), ("max_new_tokens",)),
    **dict.fromkeys(("generation_batch_size", "prompts_per_batch"), ("prompts_per_step",)),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), ("aggregation",)),
    **{"num_iterations": ("epochs",), "epsilon": ("clip_low",), "epsilon_high": ("clip_high",)},
    **{"scale_rewards": ("std",), "peft_config": ("lora",), "output_dir": ("run",), "report_to": ("loggers",)},
    **{"args": ("config",), "eval_dataset": ("callbacks",)},
}
"""What other libraries call a setting of ours."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known word, or nothing."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(key: str, known: list[str]) -> str:
    """Say that a key is unknown, and which one may be meant."""
    other = next((word for word in OTHER_WORDS.get(key, ()) if word in known), None)
    near = did_you_mean(key, known) if other is None else f"; did you mean {other!r}?"
    if near or not known:
        return f"unknown key{near}"
    listed = ", ".join(known) if len(known) <= 12 else ", ".join(known[:12]) + ", ..."
    return f"unknown key; known: {listed}"
