"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to get out of step."""

from __future__ import annotations

import math
from collections.abc import Callable

from etude.config.training import OptimizerConfiguration
from etude.errors import ConfigError

Factor = Callable[[int], float]


def make_schedule(config: OptimizerConfiguration, total_steps: int | None) -> Factor | None:
    """Return the factor on the peak rate at each step (counted from 0), or None for a constant rate."""
    if config.schedule == "constant" and not config.warmup_steps:
        return None
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if config.schedule in ("linear", "cosine") and total_steps is None:
        raise ConfigError(
            f"training.schedule: {config.schedule!r} needs the length of the run in steps or epochs; "
            "give training.training_steps, or use 'constant' or 'inverse_sqrt'"
        )
    span = max(1, (total_steps or 0) - warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / span)
        if config.schedule == "linear":
            return floor + (1 - floor) * (1 - done)
        if config.schedule == "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        if config.schedule == "inverse_sqrt":
            return math.sqrt(max(1, warmup) / max(1, warmup, step + 1))
        return 1.0

    return factor
