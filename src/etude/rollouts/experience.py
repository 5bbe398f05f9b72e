"""The sampler form of `Trainer`: rollouts of a sampler as Data, and a solver as the Algorithm that learns from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from etude.errors import ConfigError, RolloutError
from etude.policies.base import evaluating
from etude.rng import STREAM_ROLLOUT, fold
from etude.rollouts.graph import Graph
from etude.rollouts.harness import Harness
from etude.rollouts.measures import Metrics, timed
from etude.types import DataSpec, Loss, Rollouts, Updates, is_number
from etude.types.duration import Progress
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.config.training import TrainingConfiguration
    from etude.trainer import Trainer

log = logging.getLogger("etude")


def join_sampler(
    config: TrainingConfiguration, sampler: Any, solver: Any, policy: Any = None, data: Any = None
) -> tuple[Harness, nn.Module, Experience, SolverAlgorithm]:
    """Return what `Trainer(config, sampler, solver)` trains with: a harness, and policy, data and algorithm of it."""
    if policy is not None or data is not None:
        raise ConfigError("give either policy and data, or a sampler")
    if solver is None:
        raise ConfigError("training on rollouts of a sampler needs an algorithm")
    harness = Harness(sampler, solver, config.num_episodes_per_experience, batch_size=config.batch_size)
    algorithm = SolverAlgorithm(harness)
    return harness, trained_module(sampler.system), Experience(harness, algorithm), algorithm


class Experience:
    """Data made by a harness: each step collects rollouts with the policy as it is."""

    spec: DataSpec | None = None

    def __init__(self, harness: Harness, algorithm: SolverAlgorithm) -> None:
        self.harness, self.algorithm = harness, algorithm
        self.metrics: Metrics = {}
        self.timings: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> None:
        """Learn who trains."""
        self._policy = trainer.policy
        self.harness.sampler.report = trainer.session.tell

    def open(self, place: Place) -> None:
        """Get ready to collect one rank's share."""
        if self.harness.num_episodes_per_experience < place.world:
            raise ConfigError(
                f"training.num_episodes_per_experience: {self.harness.num_episodes_per_experience} rollouts cannot be "
                f"shared by {place.world} ranks"
            )
        self.place = place

    def take(self, step: int) -> Rollouts:
        """Collect this rank's rollouts of a step: trees, which stay trees because solvers flatten them themselves."""
        place = self.place
        with timed(self.timings, "rollout"), torch.no_grad(), evaluating(self._policy):
            graphs = self.harness.collect(fold(place.seed, STREAM_ROLLOUT, step), (place.rank, place.world))
        rewards = [node.reward for graph in graphs for node in graph.nodes()]
        episodes = len(graphs) + self.harness.failures
        self.metrics = {"rollout/failed": (self.harness.failures / max(1, episodes), float(episodes))}
        if rewards:
            self.metrics["rollout/reward"] = (sum(rewards) / len(rewards), float(len(rewards)))
        return Rollouts(graphs)

    def ids(self, step: int) -> Sequence[Any]:
        """Name the experience."""
        return [[f"experience {step}"]]

    def epochs(self, step: int) -> float:
        """Experience has no epochs."""
        return 0.0

    def close(self) -> None:
        """Say how many steps there was nothing to learn from in."""
        self.harness.sampler.report = None
        if self.place.rank == 0:
            self.algorithm.say_barren()

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that wait to be trained on, which checkpoints keep with the data."""
        return self.algorithm.waiting_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the batches that waited."""
        self.algorithm.load_waiting(state)


@dataclass(frozen=True)
class Samples:
    """A batch that a solver collated, and how many samples are in it."""

    batch: Any
    count: int
    """0 for a batch that is only there so that all ranks take equally many updates."""


class SolverAlgorithm:
    """A solver (`flatten`, `collate_fn`, `step`) as an Algorithm: one experience, as many updates as its batches fill.

    Batches that do not fill an accumulation window wait for the next experience (no weight changes in between, so
    their gradient is the same); they are part of the checkpoint. The last step leaves none behind. What else a solver
    has can be asked for here.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness, self.solver = harness, harness.algorithm
        self.metrics: Metrics = {}
        self._waiting: list[Samples] = []
        self._learned = self._to_learn = 0
        self._steps = self._barren = self._updates = 0
        self._cut_short = 0
        """Batches of an update at the end that did not fill its window, which a longer run would have filled."""

    def __getattr__(self, name: str) -> Any:
        if name in ("solver", "harness"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.solver, name)

    def attach(self, trainer: Trainer) -> None:
        """Learn who trains."""
        self._session = trainer.session
        if hasattr(self.solver, "attach"):
            self.solver.attach(trainer)

    def experience(self, policy: nn.Module, graphs: Sequence[Graph], *, rows: int | None = None) -> Updates:
        """Make batches of rollouts, and updates of them and of those that waited; ranks call together."""
        session = self._session
        place, step = session.place, session.progress.step
        with torch.no_grad(), evaluating(policy):
            cut = self.harness.cut(graphs, fold(place.seed, STREAM_ROLLOUT, step), place.rank)
            batches = [Samples(self.solver.collate_fn(samples), len(samples)) for samples in cut]
        waiting, size, total = self._waiting + batches, place.accumulate, session.total_steps
        whole = len(waiting) // size * size
        groups = [waiting[first : first + size] for first in range(0, whole, size)]
        self._waiting = waiting[whole:]
        if self._waiting and total is not None and step + 1 >= total:
            groups, self._waiting, self._cut_short = [*groups, self._waiting], [], len(self._waiting)
        groups = self._evened(groups)
        # Of all ranks together: the mean over ranks of what each would make if all were like it.
        self.metrics = {f"rollout/{self._kind}": (float(self.harness.samples * place.world), 1.0)}
        self.metrics["rollout/updates"] = (float(len(groups)), 1.0)
        self._steps, self._updates = self._steps + 1, self._updates + len(groups)
        self._barren += not self.harness.samples
        self._learned, self._to_learn = 0, sum(map(len, groups))
        return Updates(groups)

    @property
    def _kind(self) -> str:
        return str(getattr(self.solver, "samples", "samples"))

    def _evened(self, groups: list[list[Samples]]) -> list[list[Samples]]:
        """Let all ranks take equally many updates; what a rank is short of weighs nothing."""
        place, gather = self._session.place, self._session.gather
        if place.world == 1:
            return groups
        spare = next((sample for group in groups for sample in group), None) or next(iter(self._waiting), None)
        found = gather([len(groups), spare is None])
        most = max(count for count, _ in found)
        if most and any(lacks and count < most for count, lacks in found):
            lent = next((batch for batch in gather(_as_json(spare)) if batch is not None), None)
            spare = spare or (None if lent is None else Samples(json.loads(lent), 0))
        if len(groups) < most and spare is None:
            raise RolloutError(
                f"rank {place.rank} collected no {self._kind}, and those of other ranks cannot be lent to it; "
                "collect more episodes per experience"
            )
        return groups + [[Samples(spare.batch, 0)] for _ in range(most - len(groups)) if spare is not None]

    def loss(self, policy: nn.Module, samples: Samples) -> Loss:
        """Return the solver's loss of a batch."""
        mean, logs = self.harness.step(samples.batch)
        self._learned += 1
        self._session.tell("batches learned from", self._learned, self._to_learn)
        numbers = {str(name): value for name, value in logs.items() if is_number(value)}
        return Loss.mean(mean, samples.count, numbers)

    def say_barren(self) -> None:
        """Say how many steps there was nothing to learn from in, if there were any."""
        if self._barren:
            log.warning(
                "%d of %d steps gave no %s to learn from%s",
                self._barren, self._steps, self._kind,
                "" if self._updates else ": no update was made, and the weights are those from before training",
            )  # fmt: skip

    def waiting_state(self) -> dict[str, Any]:
        """Return the batches that wait on every rank, and what was counted; ranks call together."""
        session = self._session
        everyone = [(session.place.rank, [[sample.batch, sample.count] for sample in self._waiting])]
        if session.place.world > 1:
            everyone = session.gather(everyone[0])
        counted = {"steps": self._steps, "barren": self._barren, "updates": self._updates}
        pending = {str(rank): waiting for rank, waiting in everyone if waiting}
        return {"pending": pending, "counted": counted, "cut_short": self._cut_short}

    def load_waiting(self, state: Mapping[str, Any]) -> None:
        """Take up what `waiting_state` returned."""
        place = self._session.place
        waiting = state.get("pending", {}).get(str(place.rank), [])
        self._waiting = [Samples(batch, count) for batch, count in waiting]
        counted = state.get("counted", {})
        self._steps, self._barren, self._updates = (counted.get(name, 0) for name in ("steps", "barren", "updates"))
        if state.get("cut_short") and not self._session.length.reached(Progress(self._steps)):
            log.warning(
                "the run had ended with an update of %d of %d batches of gradient_accumulation_steps, which in one "
                "longer run are part of a whole one: it goes on, but not bit for bit as that run would",
                state["cut_short"], place.accumulate,
            )  # fmt: skip


def _as_json(samples: Samples | None) -> str | None:
    """Return a batch as another rank can take it, if it is made of plain values."""
    try:
        return None if samples is None else json.dumps(samples.batch)
    except (TypeError, ValueError):
        return None


def trained_module(system: Any) -> nn.Module:
    """Return what a system trains as one module, so that it can be saved and shared by ranks."""
    wanted = {id(parameter) for parameter in system.parameters()}
    for name in ("auditor", "tester"):
        module = getattr(system, name, None)
        if isinstance(module, nn.Module) and wanted == {id(p) for p in module.parameters()}:
            return module
    parts = {name: part for name, part in vars(system).items() if isinstance(part, nn.Module)}
    trained = {name: part for name, part in parts.items() if any(id(p) in wanted for p in part.parameters())}
    if wanted == {id(p) for part in trained.values() for p in part.parameters()}:
        return nn.ModuleDict(trained)
    holder = nn.Module()
    holder.parameters_ = nn.ParameterList(list(system.parameters()))
    return holder
