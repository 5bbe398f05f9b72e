"""The harness: collects experience with a sampler and turns it into batches for an algorithm."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from etude.errors import ConfigError, EtudeError, RolloutError
from etude.rng import fold
from etude.rollouts.graph import Graph, Sampler

log = logging.getLogger("etude")
_ASKED = ("flatten", "collate_fn", "step")


class Solver(ABC):
    """An algorithm on rollouts: flattens trees into samples, collates samples, makes a loss of a batch."""

    samples: str = "samples"
    """What a sample is called in metrics and messages."""
    no_samples: str = "the algorithm made none of them"
    """Why rollouts may come without any."""

    def __init__(self, system: Any) -> None:
        self.system = system

    @abstractmethod
    def flatten(self, graph: Graph) -> Sequence[Any]:
        """Return the samples of one tree."""

    @staticmethod
    @abstractmethod
    def collate_fn(steps: Sequence[Any]) -> Any:
        """Make a batch of samples."""

    @abstractmethod
    def step(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the mean loss of a batch, and what is worth logging."""


class Harness:
    """Makes experience: so many rollouts, flattened, shuffled and cut into batches."""

    def __init__(
        self,
        sampler: Sampler,
        algorithm: Any,
        num_episodes_per_experience: int = 32,
        *,
        batch_size: int = 16,
        shuffle: bool = True,
        on_error: Literal["skip", "stop"] = "skip",
    ) -> None:
        """Join sampler and algorithm.

        Args:
            sampler: Makes the rollouts.
            algorithm: Has `flatten`, `collate_fn` and `step`.
            num_episodes_per_experience: Rollouts per experience.
            batch_size: Samples per batch; the last batch of an experience may be smaller.
            shuffle: Mix the samples of an experience.
            on_error: Whether a rollout that fails is left out, or ends the run. One that all fail in ends it anyway.
        """
        if not callable(getattr(sampler, "rollout", None)) or not hasattr(sampler, "system"):
            raise ConfigError(f"sampler must have rollout() and a system, as a Sampler has; got {_shown(sampler)}")
        if isinstance(algorithm, type) or not all(hasattr(algorithm, name) for name in _ASKED):
            raise ConfigError(f"algorithm must have {', '.join(_ASKED)}, as a Solver has; got {_shown(algorithm)}")
        count: Any
        for name, count in (("num_episodes_per_experience", num_episodes_per_experience), ("batch_size", batch_size)):
            if not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name} must be a whole number from 1, got {count!r}")
        self.sampler, self.algorithm = sampler, algorithm
        self.num_episodes_per_experience, self.batch_size = num_episodes_per_experience, batch_size
        self.shuffle, self.on_error = shuffle, on_error
        self.failures = 0
        """Rollouts of the last experience that failed."""
        self.graphs: list[Graph] = []
        """The rollouts of the last experience."""
        self.samples = 0
        """The samples that the algorithm made of them."""
        self._has_warned = False

    def experience(self, seed: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Any]:
        """Collect rollouts with the policy as it is, and return batches of them.

        Args:
            seed: Decides everything random; None draws one.
            share: (rank, world): which part of the episodes to collect here.
        """
        seed = int(np.random.randint(2**31)) if seed is None else seed
        for samples in self.cut(self.collect(seed, share), seed, share[0]):
            yield self.algorithm.collate_fn(samples)

    def collect(self, seed: int, share: tuple[int, int] = (0, 1)) -> list[Graph]:
        """Return this rank's rollouts of an experience; they are kept as `graphs` until the next."""
        rank, world = share
        seeds = [fold(seed, episode) >> 1 for episode in range(rank, self.num_episodes_per_experience, world)]
        self.graphs = self._collect(seeds)
        return self.graphs

    def cut(self, graphs: Sequence[Graph], seed: int, rank: int = 0) -> Iterator[Sequence[Any]]:
        """Flatten rollouts into samples, mix them, and return as many at a time as make a batch."""
        samples = [sample for graph in graphs for sample in self.algorithm.flatten(graph)]
        self.samples = len(samples)
        if not samples:
            self._warn_once()
        if self.shuffle:
            order = np.random.Generator(np.random.Philox(fold(seed, rank, len(samples)))).permutation(len(samples))
            samples = [samples[index] for index in order]
        for first in range(0, len(samples), self.batch_size):
            yield samples[first : first + self.batch_size]

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            kind = getattr(self.algorithm, "samples", Solver.samples)
            reason = getattr(self.algorithm, "no_samples", Solver.no_samples)
            log.warning(
                "%d rollouts gave no %s to learn from: %s; until there are some, no weight changes",
                len(self.graphs), kind, reason,
            )  # fmt: skip

    def _collect(self, seeds: Sequence[int]) -> list[Graph]:
        self.failures = 0
        try:
            return self.sampler.rollouts(seeds)
        except Exception as error:
            if self.on_error == "stop" or isinstance(error, EtudeError):
                raise
            # One of them fails: go one by one, and leave out the one that does.
            log.warning("a rollout failed (%s: %s); collecting one by one", type(error).__name__, error)
        graphs = []
        for seed in seeds:
            try:
                graphs.append(self.sampler.rollout(seed))
            except Exception as error:  # noqa: BLE001 - a rollout runs code of the user's, which may fail in any way
                self.failures += 1
                reason = error
        if seeds and not graphs:
            raise RolloutError(f"all {len(seeds)} rollouts failed; the last with {type(reason).__name__}: {reason}")
        return graphs

    def step(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss of a batch and what is worth logging."""
        found = self.algorithm.step(batch)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(f"{type(self.algorithm).__name__}.step must return (loss, logs)")
        loss, logs = found
        return loss, logs or {}


def _shown(given: Any) -> str:
    return f"the class {given.__name__} itself" if isinstance(given, type) else type(given).__name__
