"""The values that pass between the nouns: Loss, Feature, DataSpec, Rollouts, Updates, Result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from etude.types.batch import Batch, create_dummy_batch
from etude.types.duration import Duration, Progress
from etude.types.trajectory import Trajectory

__all__ = ["Batch", "DataSpec", "Duration", "Feature", "Loss", "Progress", "Result", "Rollouts", "Trajectory"]
__all__ += ["Updates", "batch_length", "create_dummy_batch"]

Number = float | int | Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """A sum and how much it sums over, so that no split of a batch can change the update.

    `total / weight` is the mean that people plot; engines divide by the weight of the whole global batch instead.
    """

    total: Tensor
    """Sum over everything that counts (tokens, frames, samples); carries the gradient."""
    weight: Number
    """How many things were summed."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """Means worth logging; averaged with the same weight."""

    @classmethod
    def mean(cls, mean: Tensor, weight: Number, metrics: Mapping[str, Number] | None = None) -> Loss:
        """Make a Loss of a mean over `weight` things."""
        return cls(mean * weight, weight, metrics or {})

    @classmethod
    def of(cls, value: Any, batch: Any) -> Loss:
        """Accept a Loss, `{"loss": mean, ...}`, `(mean, ...)` or a scalar; a mean is weighed by the batch size."""
        root, factor, weight, metrics = split_loss(value, batch)
        return cls(root if factor == 1 else root * factor, weight, metrics)

    def __getitem__(self, name: str) -> Number:
        """Read it as a dictionary: `loss["loss"]` is the mean, anything else a metric.

        The mean remembers what it is a mean over for as long as nothing is done to it, so that a `compute_loss` which
        returns it is weighed rightly.
        """
        if name != "loss":
            return self.metrics[name]
        mean = self.total / self.weight
        mean.mean_of = self  # type: ignore[attr-defined]
        return mean

    def keys(self) -> list[str]:
        """Return what it can be read by; `dict(loss)` needs this."""
        return ["loss", *self.metrics]


def split_loss(value: Any, batch: Any) -> tuple[Tensor, int, Number, Mapping[str, Number]]:
    """Return (root, factor, weight, metrics) with total = root * factor, without adding to the graph.

    A mean is its own root: engines fold the factor into the gradient they start from, so that a plain mean over a
    whole batch is differentiated exactly as a loop written by hand would.
    """
    if isinstance(value, Loss):
        return value.total, 1, value.weight, value.metrics
    metrics: dict[str, Number] = {}
    if isinstance(value, Mapping):
        if "loss" not in value:
            raise ValueError(f"a loss dictionary needs the key 'loss', got {sorted(map(str, value))}")
        metrics = {str(k): v for k, v in value.items() if k != "loss" and is_number(v)}
        value = value["loss"]
    elif isinstance(value, tuple) and value:
        value = value[0]
    if isinstance(value, Loss):
        return value.total, 1, value.weight, {**value.metrics, **metrics}
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"compute_loss must return a Loss, a dictionary with 'loss', or a scalar; got {found}")
    whole = getattr(value, "mean_of", None)
    if isinstance(whole, Loss):
        return whole.total, 1, whole.weight, {**whole.metrics, **metrics}
    weight = batch_length(batch)
    return value if value.dim() == 0 else value.reshape(()), weight, weight, metrics


def is_number(value: Any) -> bool:
    """Tell whether a value is worth logging: a number, or a tensor that holds one."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def batch_length(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor, or its length."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    values: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        values = list(batch.values())
    elif isinstance(batch, tuple | list):
        values = batch
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    for value in values:
        if isinstance(value, Mapping | tuple):
            return batch_length(value)
    return len(batch) if hasattr(batch, "__len__") else 1


@dataclass(frozen=True, slots=True)
class Feature:
    """One named stream of data: what it is, its shape, and its statistics."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    role: Literal["state", "image", "environment", "action", "task", "text", "other"] = "other"
    classes: int | None = None
    """Number of classes of a discrete feature."""
    names: tuple[str, ...] | None = None
    """Names of the dimensions, if they have any."""
    stats: Mapping[str, Any] | None = None
    """mean, std, min, max, q01, q99, count: nested lists or tensors of the feature's shape."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The features of a dataset by name; what a lazy policy is built from."""

    features: Mapping[str, Feature]
    fps: float | None = None

    def with_role(self, role: str) -> dict[str, Feature]:
        """Return the features of one role."""
        return {name: feature for name, feature in self.features.items() if feature.role == role}

    def __getitem__(self, name: str) -> Feature:
        return self.features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.features)


@dataclass(frozen=True)
class Rollouts:
    """What a step's rollouts came to, before an algorithm has seen them: what data that the policy makes yields."""

    completed: Sequence[Any]
    """Trajectories; trees of turns where the algorithm flattens trees itself."""
    are_padding: bool = False
    """Whether they are there only so that this rank takes part in every update, and weigh nothing."""

    def __len__(self) -> int:
        return len(self.completed)

    def __getitem__(self, index: int) -> Any:
        return self.completed[index]


@dataclass(frozen=True)
class Updates:
    """One experience as several optimizer updates: each group of micro-batches makes one."""

    groups: Sequence[Sequence[Any]]
    """Micro-batches by update, in order."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(self.groups)

    def __getitem__(self, index: int) -> Sequence[Any]:
        return self.groups[index]


@dataclass(frozen=True)
class Result:
    """What `fit` leaves in your hand; everything else is in the run directory."""

    steps: int
    """Optimizer steps taken over the life of the run."""
    metrics: dict[str, float]
    """The last value of every metric."""
    run_dir: Path | None
    best: Path | None
    """The best checkpoint, by `best_metric`; None without evaluation."""
    last: Path | None
    stopped: str = "finished"
    """Why training ended: 'finished' or 'early stopping: ...'."""
    first_step: int = 0
    """The step that this call went on from; `steps` itself if the run had finished before and nothing was trained."""
    changes: tuple[str, ...] = ()
    """What differs from the session that the call went on from: settings, code and data, in words."""
