"""Etude: write a trainer once, run it on any engine, and get the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.callbacks import Callback
    from etude.config.restore import load_policy
    from etude.config.training import TrainingConfiguration
    from etude.grpo_trainer import GRPOTrainer
    from etude.simulation.evaluate import evaluate_policy
    from etude.simulation.record import record
    from etude.trainer import Trainer
    from etude.types import Batch, DataSpec, Feature, Loss, Result, Trajectory
    from etude.types.duration import Duration
    from etude.types.protocols import Algorithm, Data, Engine, Logger, Policy

__all__ = ["Algorithm", "Batch", "Callback", "Data", "DataSpec", "Duration", "Engine", "Feature", "GRPOTrainer"]
__all__ += ["Logger", "Loss", "Policy", "Result", "Trainer", "TrainingConfiguration", "Trajectory", "evaluate_policy"]
__all__ += ["load_policy", "record"]
__version__ = "0.1.0"

# On first use, so that `import etude` and the command line stay fast and free of torch.
_HOMES = {
    "callbacks": ("Callback",), "config.restore": ("load_policy",), "config.training": ("TrainingConfiguration",),
    "grpo_trainer": ("GRPOTrainer",), "simulation.evaluate": ("evaluate_policy",), "simulation.record": ("record",),
    "trainer": ("Trainer",),
    "types": ("Batch", "DataSpec", "Duration", "Feature", "Loss", "Result", "Trajectory"),
    "types.protocols": ("Algorithm", "Data", "Engine", "Logger", "Policy")}  # fmt: skip
__getattr__, __dir__ = lazily(__name__, _HOMES)
