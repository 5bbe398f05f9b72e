"""The rollout workers of a run, as the driver sees them: started, watched, replaced when lost, and ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from etude.engines.ray.actors import Actors, start_actors
from etude.engines.ray.log_forwarding import log_levels
from etude.engines.ray.outcome import revive
from etude.engines.ray.rollouts import RolloutPlan, RolloutWorker
from etude.engines.ray.shipping import Parcel
from etude.errors import RankError
from etude.rollouts.online import OnlineData

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")
untyped: Any = ray

FOLDER = "replay"
"""Where in the run directory episodes are kept."""
LOOK_EVERY_S = 2.0
WAITS_FOR_S = 10.0
"""How long trainers may wait for a place before a rollout worker gives way."""
MOST_LOST = 10
"""Workers that may be lost, for each that there is, without an episode in between."""


def count_rollout_workers(trainer: Trainer, ranks: int, *, is_sharded: bool = False) -> int:
    """Return how many rollout workers a trainer wants; refuse what cannot be played before anything is started."""
    data: Any = trainer.data
    if not isinstance(data, OnlineData):
        return 0
    config, _ = trainer.config, data.env_spec  # refused here if it does not fit
    data.require_room(config.batch_size, ranks * config.gradient_accumulation_steps)
    data.require_ranks(ranks, is_sharded=is_sharded)
    return data.settings.workers


@contextmanager
def rollouts_beside(trainer: Trainer, folder: Path, parcel: Parcel, mailbox: Any) -> Iterator[Crew | None]:
    """Play beside the training, if there is something to play; everything is ended at the end."""
    data: Any = trainer.data
    if not isinstance(data, OnlineData):
        yield None
        return
    log.info(
        "%d rollout workers play while %s trains: on Ray an online run is not bit for bit another one, as it is with "
        "engine: torch", data.settings.workers, type(trainer.policy).__name__,
    )  # fmt: skip
    buffer = data.buffer
    actors = start_actors(
        folder / FOLDER, max_frames=buffer.max_frames, max_bytes=buffer.max_bytes, sampling=buffer.sampling, allowed=0
    )
    plan = RolloutPlan(trainer.policy, data.settings, trainer.config.seed)
    crew = Crew(data.settings.workers, replace(parcel, trainer=ray.put(plan)), actors, mailbox, log_levels())
    try:
        yield crew
    finally:
        crew.end()
        actors.end()


class Crew:
    """Keeps a number of rollout workers at work.

    Args:
        workers: How many.
        parcel: What is unpacked into their plan.
        actors: The two actors.
        mailbox: Where what they say goes.
        levels: What the driver wants to hear.
        resources: What each of them gets.
    """

    def __init__(
        self, workers: int, parcel: Any, actors: Actors, mailbox: Any, levels: Mapping[str, int],
        resources: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.actors, self._told = actors, ([ray.put(parcel)], actors, mailbox, levels)
        self.failure: BaseException | None = None
        """The error that no other worker could mend."""
        self._kind = untyped.remote(num_cpus=1, **(resources or {}))(RolloutWorker)
        self._running: dict[Any, tuple[int, Any]] = {}
        self._lost = self._episodes = 0
        self._looked_s = self._placed_s = time.monotonic()
        self._limit = MOST_LOST * workers
        for number in range(workers):
            self._start(number)

    def _start(self, number: int) -> None:
        actor = self._kind.remote(number, *self._told)
        self._running[actor.run.remote()] = (number, actor)

    def watch(self) -> BaseException | None:
        """Replace workers that were lost; return the error of one that failed, which another would meet too."""
        if self.failure is not None or not self._running:
            return self.failure
        self._give_way()
        ended, _ = untyped.wait(list(self._running), num_returns=len(self._running), timeout=0)
        for call in ended:
            number, actor = self._running.pop(call)
            try:
                outcome = ray.get(call)
            except ray.exceptions.RayActorError as error:
                self._replace(number, error)
                continue
            untyped.kill(actor)
            if "error" in outcome:
                self.failure = revive(outcome["error"])
        return self.failure

    def _replace(self, number: int, error: Exception) -> None:
        episodes = ray.get(self.actors.replay_buffer.counts.remote()).episodes
        self._lost = self._lost + 1 if episodes == self._episodes else 1
        self._episodes = episodes
        if self._lost > self._limit:
            reason = str(error).strip().splitlines()[0]
            self.failure = RankError(f"rollout workers died {self._lost} times without an episode in between: {reason}")
            return
        log.warning("rollout worker %d was lost; another takes its place", number)
        self._start(number)

    def _give_way(self) -> None:
        """End a worker where trainers that are started again find no place: those of a lost node need its CPU."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        if not _trainers_wait():
            self._placed_s = now
        if now - self._placed_s < WAITS_FOR_S:
            return
        self._placed_s = now
        _, (number, actor) = self._running.popitem()
        untyped.kill(actor)
        if self._running:
            log.warning("rollout worker %d gives way: the trainers find no CPU on what is left of the cluster", number)
            return
        self.failure = RankError(
            "what is left of the cluster has no room for the trainers and a rollout worker; add a node, then run the "
            "same again: it goes on from the newest checkpoint"
        )

    def end(self) -> None:
        """End all of them; what they were playing is nobody's."""
        for _, actor in self._running.values():
            untyped.kill(actor)
        self._running.clear()


def _trainers_wait() -> bool:
    """Tell whether workers of this job's trainer are to be placed and there is not a CPU for one of them."""
    job = ray.get_runtime_context().get_job_id()  # the end of every id that the job gives
    for name, group in untyped.util.placement_group_table().items():
        if name.endswith(job) and group["state"] in ("PENDING", "RESCHEDULING"):
            least = min(float(bundle.get("CPU", 0.0)) for bundle in group["bundles"].values())
            return float(untyped.available_resources().get("CPU", 0.0)) < least
    return False
