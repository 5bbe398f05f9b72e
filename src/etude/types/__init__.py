"""The values and shapes that pass between the nouns: Loss, Batch, Trajectory, DataSpec, Duration, Result, protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.types.batch import Batch, create_dummy_batch
    from etude.types.duration import Duration, Progress
    from etude.types.trajectory import Trajectory
    from etude.types.values import (
        DataSpec,
        Feature,
        Loss,
        Number,
        Result,
        Rollouts,
        Updates,
        batch_length,
        is_number,
        split_loss,
    )  # fmt: skip

__all__ = ["Batch", "DataSpec", "Duration", "Feature", "Loss", "Number", "Progress", "Result", "Rollouts"]
__all__ += ["Trajectory", "Updates", "batch_length", "create_dummy_batch", "is_number", "split_loss"]

# On first use: durations and protocols are read by the command line, which imports no torch.
_HOMES = {
    "batch": ("Batch", "create_dummy_batch"), "duration": ("Duration", "Progress"), "trajectory": ("Trajectory",),
    "values": (
        "DataSpec", "Feature", "Loss", "Number", "Result", "Rollouts", "Updates", "batch_length", "is_number",
        "split_loss",
    ),
}  # fmt: skip
__getattr__, __dir__ = lazily(__name__, _HOMES)
