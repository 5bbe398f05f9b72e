"""From YAML to a validated configuration to built objects. Imports no torch.

Values follow YAML 1.2: `1e-4` is a number, only `true` and `false` are truth values. A file may build on others
(`defaults:`), refer to its own values (`${training.lr}`) and to the environment (`${env:NAME}`).

    from etude.config.build import build
    from etude.config.load import load

    build(load("configs/digits.yaml", ["training.lr=1e-4"])).fit()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.config.dump import to_yaml
    from etude.config.load import Loaded
    from etude.config.schema import ExperimentConfig
    from etude.config.training import TrainingConfiguration

__all__ = ["ExperimentConfig", "Loaded", "TrainingConfiguration", "to_yaml"]

_HOMES = {
    "ExperimentConfig": "schema",
    "Loaded": "load",
    "TrainingConfiguration": "training",
    "to_yaml": "dump",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"etude.config.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'etude.config' has no attribute {name!r}")
