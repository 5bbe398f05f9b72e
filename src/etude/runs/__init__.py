"""What is left behind: run directories, checkpoints, metrics, loggers. Names are imported when first used."""

from __future__ import annotations

from etude.lazy import lazily

_HOMES = {
    "checkpoint": ("Checkpoint", "CheckpointStore"),
    "directory": ("Run", "RunSummary", "resolve_run"),
    "loggers": ("LoggerGroup", "MlflowLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger"),
    "metrics": ("MetricsLog", "read_metrics"),
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__, __dir__ = lazily(__name__, _HOMES)
