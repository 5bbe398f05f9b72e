"""Etude: write a trainer once, run it on any engine, and get the same numbers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.callbacks import Callback
    from etude.config.restore import load_policy
    from etude.config.training import TrainingConfiguration
    from etude.duration import Duration
    from etude.protocols import Algorithm, Data, Engine, Logger, Policy
    from etude.rollouts.evaluate import evaluate_policy
    from etude.rollouts.record import record
    from etude.trainer import Trainer
    from etude.types import Batch, DataSpec, Feature, Loss, Result, Trajectory

__all__ = ["Algorithm", "Batch", "Callback", "Data", "DataSpec", "Duration", "Engine", "Feature", "Logger", "Loss"]
__all__ += ["Policy", "Result", "Trainer", "TrainingConfiguration", "Trajectory", "evaluate_policy"]
__all__ += ["load_policy", "record"]
__version__ = "0.1.0"

# Imported on first use, so that `import etude` and the command line stay fast and free of torch.
_HOMES = {
    "etude.callbacks": ("Callback",), "etude.config.restore": ("load_policy",), "etude.duration": ("Duration",),
    "etude.config.training": ("TrainingConfiguration",), "etude.rollouts.evaluate": ("evaluate_policy",),
    "etude.protocols": ("Algorithm", "Data", "Engine", "Logger", "Policy"), "etude.rollouts.record": ("record",),
    "etude.trainer": ("Trainer",)}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'etude' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "etude.types")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
