"""What is left behind: run directories, checkpoints, metrics, loggers. Names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Checkpoint": "checkpoint",
    "CheckpointStore": "checkpoint",
    "LoggerGroup": "loggers",
    "MetricsLog": "metrics",
    "MlflowLogger": "loggers",
    "Run": "directory",
    "RunSummary": "directory",
    "TensorBoardLogger": "loggers",
    "TrackioLogger": "loggers",
    "WandbLogger": "loggers",
    "read_metrics": "metrics",
    "resolve_run": "directory",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
