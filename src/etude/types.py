"""The values that pass between the nouns: Loss, Feature, DataSpec, Batch, Trajectory, Duration, Result.

Shape letters: B batch, T time or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from etude.duration import Duration, Progress

__all__ = ["Batch", "DataSpec", "Duration", "Feature", "Loss", "Progress", "Result", "Trajectory", "batch_length"]

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
        metrics = {str(k): v for k, v in value.items() if k != "loss" and _is_number(v)}
        value = value["loss"]
    elif isinstance(value, tuple) and value:
        value = value[0]
    if isinstance(value, Loss):
        return value.total, 1, value.weight, {**value.metrics, **metrics}
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"compute_loss must return a Loss, a dictionary with 'loss', or a scalar; got {found}")
    weight = batch_length(batch)
    return value if value.dim() == 0 else value.reshape(()), weight, weight, metrics


def _is_number(value: Any) -> bool:
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


@dataclass
class Trajectory:
    """One rollout: what was seen, done and earned, with free room for more."""

    tokens: Any = None
    """Sampled token ids or actions, in order."""
    observations: Any = None
    loss_mask: Any = None
    reward: float = 0.0
    advantage: float | None = None
    logprobs: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field or an extra field, like a dictionary."""
        try:
            return self[name]
        except KeyError:
            return default

    def __getitem__(self, name: str) -> Any:
        if name in _TRAJECTORY_FIELDS:
            return getattr(self, name)
        return self.extra_fields[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in _TRAJECTORY_FIELDS:
            setattr(self, name, value)
        else:
            self.extra_fields[name] = value


_TRAJECTORY_FIELDS = frozenset(Trajectory.__dataclass_fields__)


@dataclass
class Batch:
    """Stacked trajectories: `values` hold tensors of shape (B, ...), `metadata` everything else."""

    values: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: value.shape[0] for name, value in self.values.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the tensors of a batch must have one length, got {lengths}")

    def __len__(self) -> int:
        return next((value.shape[0] for value in self.values.values()), 0)

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.metadata[name]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on another device."""
        return Batch({name: value.to(device) for name, value in self.values.items()}, dict(self.metadata))


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
