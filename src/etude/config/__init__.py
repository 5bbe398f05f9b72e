"""From an experiment file to a validated configuration to built objects. Imports no torch.

from etude.config.build import build
from etude.config.load import load

build(load("configs/digits.yaml", ["training.lr=1e-4"])).fit()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.config.dump import to_yaml
    from etude.config.load import Loaded
    from etude.config.schema import ExperimentConfig
    from etude.config.training import TrainingConfiguration

__all__ = ["ExperimentConfig", "Loaded", "TrainingConfiguration", "to_yaml"]
__getattr__, __dir__ = lazily(
    __name__,
    {"dump": ["to_yaml"], "load": ["Loaded"], "schema": ["ExperimentConfig"], "training": ["TrainingConfiguration"]},
)
