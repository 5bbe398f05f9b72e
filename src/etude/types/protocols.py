"""The nouns as Protocols: what a class must offer to serve as one. Imports no torch.

`Registry` checks classes against these at registration, so a plugin that does not fit fails at once and by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from etude.trainer import Trainer
    from etude.types import DataSpec, Loss, Rollouts


@runtime_checkable
class Policy(Protocol):
    """What is trained: a torch module whose forward turns a batch into a dictionary with a loss."""

    def forward(self, batch: Any) -> Any: ...
    def state_dict(self) -> Mapping[str, Any]: ...


ORDER_VERSION = 2
"""How the order of a large dataset is drawn; 1 drew a whole permutation of it, which old runs go on with."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the group a rank stands, and how a global batch is cut."""

    seed: int = 0
    rank: int = 0
    world: int = 1
    batch_size: int = 32
    """Samples per micro-batch."""
    accumulate: int = 1
    """Micro-batches per optimizer step and rank."""
    num_workers: int = 0
    shuffle: bool = True
    order_version: int = ORDER_VERSION
    prefetch_factor: int | None = None
    pin_memory: bool | None = None

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulate * self.world


@runtime_checkable
class Data(Protocol):
    """Where batches come from, addressed by (seed, step): nothing to save but the step.

    Data that the policy makes also offers `attach(trainer)`, called once before `take`; it may have `metrics` (name ->
    (mean, weight) of the last `take`), `timings` (name -> seconds) and `state_dict`/`load_state_dict`.
    """

    @property
    def spec(self) -> DataSpec | None:
        """Names, shapes and statistics of the features, for policies that are built from them."""

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""

    def take(self, step: int) -> Sequence[Any] | Rollouts:
        """Return this rank's micro-batches of one optimizer step, or the rollouts that an algorithm makes them of."""

    def ids(self, step: int) -> Sequence[Any]:
        """Return the sample ids of each micro-batch of `take(step)`, for error messages."""

    def epochs(self, step: int) -> float:
        """Return how many epochs `step` optimizer steps amount to."""

    def close(self) -> None:
        """Release workers and files."""


@runtime_checkable
class Algorithm(Protocol):
    """How a batch becomes a loss.

    One that learns from rollouts offers `experience(policy, batch, rows=...)`, called once a step with all of this
    rank's rollouts (stacked, unless it says `takes_trajectories`), which returns them with what `loss` needs: a
    `Batch`, cut into updates by its `epochs` and `minibatches`, or `Updates` of its own. Its `metrics` (name -> (mean,
    weight)) are then logged as those of data are.

    May also offer `prepare(policy, batch)`, run without gradient before `loss` on micro-batches that come from no
    experience, and `attach(trainer)`, called once when the session is there: its `gather` exchanges numbers with the
    other ranks.
    """

    def loss(self, policy: Any, batch: Any) -> Loss | Mapping[str, Any] | torch.Tensor: ...


@runtime_checkable
class Engine(Protocol):
    """How a loss becomes an update."""

    def run(self, trainer: Trainer, resume: str | Path) -> Any:
        """Train to the requested length and return a `Result`."""


@runtime_checkable
class Logger(Protocol):
    """Where metrics go beside metrics.jsonl. May fail at will: training never stops because of it."""

    def start(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Begin (or go on, from `first_step`) logging a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Flush and end."""


@runtime_checkable
class TrainStep(Protocol):
    """A trainer that brings its own update: made from (models, optimizers, loss, device)."""

    def train_step(self, data: Any, **kwargs: Any) -> Mapping[str, Any]: ...


@runtime_checkable
class DatasetFactory(Protocol):
    """Builds `{"dataset": Dataset, "norm_stats": dict}` (the second key optional)."""

    def build(self, opt_params: Mapping[str, Any], params: Mapping[str, Any]) -> Mapping[str, Any]: ...


@runtime_checkable
class OptimizerFactory(Protocol):
    """Builds a torch optimizer over parameters."""

    def build(self, params: Iterable[Any]) -> torch.optim.Optimizer: ...


@runtime_checkable
class LossFactory(Protocol):
    """Builds a loss module."""

    def build(self) -> torch.nn.Module: ...
