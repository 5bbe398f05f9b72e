"""Experience as Data: each step collects rollouts with the policy as it is, and trains on them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from etude.errors import ConfigError, RolloutError
from etude.rng import STREAM_ROLLOUT, fold
from etude.rollouts.harness import Harness
from etude.types import DataSpec, Loss, Updates, is_number
from etude.types.duration import Progress
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")


@dataclass(frozen=True)
class Samples:
    """A batch that an algorithm collated, and how many samples are in it."""

    batch: Any
    count: int
    """0 for a batch that is only there so that all ranks take equally many updates."""


class Experience:
    """Data made by a harness. One step is one experience, and as many updates as its batches fill.

    Batches that do not fill an accumulation window wait for the next experience (no weight changes in between, so
    their gradient is the same); they are part of the checkpoint. The last step leaves none behind.
    """

    spec: DataSpec | None = None

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.metrics: dict[str, tuple[float, float]] = {}
        self.timings: dict[str, float] = {}
        self._pending: list[Samples] = []
        self._learned = self._to_learn = 0
        self._steps = self._barren = self._updates = 0
        self._cut_short = 0
        """Batches of an update at the end that did not fill its window, which a longer run would have filled."""

    def attach(self, trainer: Trainer) -> None:
        """Learn who trains."""
        self._trainer = trainer
        self.harness.sampler.report = trainer.session.tell

    def open(self, place: Place) -> None:
        """Get ready to collect one rank's share."""
        if self.harness.num_episodes_per_experience < place.world:
            raise ConfigError(
                f"training.num_episodes_per_experience: {self.harness.num_episodes_per_experience} rollouts cannot be "
                f"shared by {place.world} ranks"
            )
        self.place = place

    def take(self, step: int) -> Updates:
        """Collect an experience and return its updates."""
        place, policy = self.place, self._trainer.policy
        began, mode = time.perf_counter(), policy.training
        policy.eval()
        with torch.no_grad():
            seed, share = fold(place.seed, STREAM_ROLLOUT, step), (place.rank, place.world)
            batches = list(self._batches(seed, share))
        policy.train(mode)
        self.timings["rollout"] = self.timings.get("rollout", 0.0) + time.perf_counter() - began
        waiting = self._pending + batches
        size, total = place.accumulate, self._trainer.session.total_steps
        whole = len(waiting) // size * size
        groups = [waiting[first : first + size] for first in range(0, whole, size)]
        self._pending = waiting[whole:]
        if self._pending and total is not None and step + 1 >= total:
            groups, self._pending, self._cut_short = [*groups, self._pending], [], len(self._pending)
        groups = self._evened(groups)
        self._measure(len(groups))
        self._learned, self._to_learn = 0, sum(map(len, groups))
        return Updates(groups)

    def _batches(self, seed: int, share: tuple[int, int]) -> list[Samples]:
        harness = self.harness
        kept, counts = harness.algorithm.collate_fn, []

        def counted(samples: Sequence[Any]) -> Any:
            counts.append(len(samples))
            return kept(samples)

        harness_batches = harness.experience(seed, share, collate=counted)
        return [Samples(batch, counts[-1]) for batch in harness_batches]

    def _measure(self, updates: int) -> None:
        rewards = [node.reward for graph in self.harness.graphs for node in graph.nodes()]
        episodes = len(self.harness.graphs) + self.harness.failures
        self.metrics = {"rollout/failed": (self.harness.failures / max(1, episodes), float(episodes))}
        if rewards:
            self.metrics["rollout/reward"] = (sum(rewards) / len(rewards), float(len(rewards)))
        # Of all ranks together: the mean over ranks of what each would make if all were like it.
        self.metrics[f"rollout/{self._samples}"] = (float(self.harness.samples * self.place.world), 1.0)
        self.metrics["rollout/updates"] = (float(updates), 1.0)
        self._steps, self._updates = self._steps + 1, self._updates + updates
        self._barren += not self.harness.samples

    @property
    def _samples(self) -> str:
        return str(getattr(self.harness.algorithm, "samples", "samples"))

    def _evened(self, groups: list[list[Samples]]) -> list[list[Samples]]:
        """Let all ranks take equally many updates; what a rank is short of weighs nothing."""
        if self.place.world == 1:
            return groups
        spare = next((sample for group in groups for sample in group), None) or next(iter(self._pending), None)
        gather = self._trainer.session.gather
        found = gather([len(groups), spare is None])
        most = max(count for count, _ in found)
        if most and any(lacks and count < most for count, lacks in found):
            lent = next((batch for batch in gather(_as_json(spare)) if batch is not None), None)
            spare = spare or (None if lent is None else Samples(json.loads(lent), 0))
        if len(groups) < most and spare is None:
            raise RolloutError(
                f"rank {self.place.rank} collected no {self._samples}, and those of other ranks cannot be lent to it; "
                "collect more episodes per experience"
            )
        return groups + [[Samples(spare.batch, 0)] for _ in range(most - len(groups)) if spare is not None]

    def loss(self, samples: Samples) -> Loss:
        """Return the algorithm's loss of a batch."""
        mean, logs = self.harness.step(samples.batch)
        self._learned += 1
        self._trainer.session.tell("batches learned from", self._learned, self._to_learn)
        numbers = {str(name): value for name, value in logs.items() if is_number(value)}
        return Loss.mean(mean, samples.count, numbers)

    def ids(self, step: int) -> Sequence[Any]:
        """Name the experience."""
        return [[f"experience {step}"]]

    def epochs(self, step: int) -> float:
        """Experience has no epochs."""
        return 0.0

    def close(self) -> None:
        """Say how many steps there was nothing to learn from in."""
        self.harness.sampler.report = None
        if self._barren and self.place.rank == 0:
            log.warning(
                "%d of %d steps gave no %s to learn from%s",
                self._barren, self._steps, self._samples,
                "" if self._updates else ": no update was made, and the weights are those from before training",
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that wait to be trained on."""
        everyone = [(self.place.rank, self._plain())]
        if self.place.world > 1:
            everyone = self._trainer.session.gather(everyone[0])
        counted = {"steps": self._steps, "barren": self._barren, "updates": self._updates}
        pending = {str(rank): waiting for rank, waiting in everyone if waiting}
        return {"pending": pending, "counted": counted, "cut_short": self._cut_short}

    def _plain(self) -> list[Any]:
        return [[sample.batch, sample.count] for sample in self._pending]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the batches that waited."""
        waiting = state.get("pending", {}).get(str(self.place.rank), [])
        self._pending = [Samples(batch, count) for batch, count in waiting]
        counted = state.get("counted", {})
        self._steps, self._barren, self._updates = (counted.get(name, 0) for name in ("steps", "barren", "updates"))
        if state.get("cut_short") and not self._trainer.session.length.reached(Progress(self._steps)):
            log.warning(
                "the run had ended with an update of %d of %d batches of gradient_accumulation_steps, which in one "
                "longer run are part of a whole one: it goes on, but not bit for bit as that run would",
                state["cut_short"], self.place.accumulate,
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
