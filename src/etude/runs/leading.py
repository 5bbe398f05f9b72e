"""What matters of a run: one order of its metrics for the terminal, lists, reports and comparisons. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

QUIET_GROUPS = ("lr/", "grad_norm/", "time/")
QUIET_NAMES = ("step", "epoch", "epochs", "tokens", "env_steps", "seconds", "loss_scale", "timestamp", "time")
DEFAULT_BEST = "eval/loss"
_EARNED = ("reward", "return", "score")
_LARGE = (*_EARNED, "success", "attack_success", "accuracy")
_SMALL = ("loss", "error", "perplexity")
_HOUSEKEEPING = ("reward_std", "failed", "truncated", "steps", "tokens", "age", "waiting", "updates")


def is_quiet(name: str) -> bool:
    """Tell whether a metric is housekeeping: learning rates, norms, times and counters."""
    return name in QUIET_NAMES or name.startswith(QUIET_GROUPS)


def lead(names: Iterable[str], best_metric: str | None = None) -> list[str]:
    """Return metrics in the order in which they matter; those that are housekeeping come last.

    What checkpoints are ranked by leads, if that was chosen. Then come success and reward where the policy was
    evaluated, the reward that it earns in training, evaluations, and the loss: first of training that imitates, last
    of training from rewards, whose loss says nothing.
    """
    given = list(names)
    is_rewarded = any(_leaf(name) in _EARNED for name in given)
    chosen = None if best_metric == DEFAULT_BEST else best_metric
    return sorted(given, key=lambda name: (name != chosen, _tier(name, is_rewarded)))


def _tier(name: str, is_rewarded: bool) -> int:
    leaf, evaluated = _leaf(name), name.startswith("eval/")
    if is_quiet(name):
        return 9
    if leaf in _HOUSEKEEPING or not (evaluated or name.startswith("train/") or "/" not in name):
        return 8
    if evaluated:
        return 0 if leaf == "success" else 1 if leaf in _EARNED else 3 if leaf == "loss" else 4
    if leaf == "loss":
        return 7 if is_rewarded else 5
    if name.endswith("online/success"):  # what is played to learn from is as good as an evaluation
        return 1
    return 2 if leaf in _EARNED else 6


def _leaf(name: str) -> str:
    return name.rpartition("/")[2]


def is_loss(name: str) -> bool:
    """Tell whether a metric is what training minimises, or a part of that."""
    return _leaf(name).endswith("loss")


def prefers_large(name: str, training: Mapping[str, Any] | None = None) -> bool | None:
    """Tell whether more of a metric is better, None if that is not known; `training` may rank checkpoints by it."""
    training = training or {}
    if training.get("best_metric", DEFAULT_BEST) == name:
        return bool(training.get("best_mode", "min") == "max")
    leaf = _leaf(name)
    if leaf in _LARGE or leaf.endswith("_accuracy") or leaf.startswith("success_"):
        return True
    return False if leaf.endswith(_SMALL) else None


def find_best(
    name: str, steps: Sequence[float], values: Sequence[float], training: Mapping[str, Any] | None = None
) -> tuple[float, float] | None:
    """Return step and value of the best point of a curve; None if there is none, or no telling which it is."""
    large = prefers_large(name, training)
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if large is None or not finite:
        return None
    index = (max if large else min)(finite, key=values.__getitem__)
    return steps[index], values[index]
