"""Run episodes in slots: each slot is refilled as soon as its episode ends, and nothing acts in an empty one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from etude.errors import EtudeError
from etude.rng import fold_more
from etude.simulation.actors import Actor, Seat
from etude.simulation.environments import make_environment
from etude.simulation.environments.base import Array, CanLookAway, Environment, Observation, StepOutcome
from etude.simulation.results import EpisodeRow
from etude.simulation.seeds import episode_key, episode_seed
from etude.simulation.video import frame_stride, write_video


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    env: str
    episode: int
    video: Path | None = None
    """Where to leave a film of it."""
    start: int | None = None
    """The episode whose beginning it has; None is its own. Episodes of one start differ in what the actor draws."""


class Witness(Protocol):
    """Sees what happens in episodes, step by step. An episode in which `began` or `saw` raises has failed."""

    def began(self, job: Job, env: Environment, observation: Observation) -> None:
        """Take note of how an episode begins."""

    def saw(self, job: Job, seat: Seat, action: Array, outcome: StepOutcome) -> None:
        """Take note of a step."""

    def lost(self, job: Job, error: Exception) -> None:
        """Take note of an episode that failed, or raise to end it all."""


@dataclass
class Stopwatch:
    """Where the time goes."""

    acting_s: float = 0.0
    simulating_s: float = 0.0
    env_steps: int = 0


class EnvironmentPool:
    """Makes environments as they are needed, and keeps those that are free for the next episode."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        make: Callable[..., Environment] = make_environment,
    ) -> None:
        self._options, self._make = options or {}, make
        self._free: dict[str, list[Environment]] = {}
        self._made: list[Environment] = []

    def borrow(self, name: str) -> Environment:
        """Return an environment that nobody uses."""
        if free := self._free.get(name):
            return free.pop()
        made = self._make(name, **self._options.get(name, {}))
        self._made.append(made)
        return made

    def give(self, name: str, env: Environment) -> None:
        """Give an environment back."""
        self._free.setdefault(name, []).append(env)

    def discard(self, env: Environment) -> None:
        """Forget an environment that failed, and close it if it still can be."""
        self._made.remove(env)
        with suppress(Exception):
            env.close()

    def close(self) -> None:
        """Close every environment."""
        for env in self._made:
            env.close()
        self._made, self._free = [], {}


@dataclass
class _Running:
    """An episode that is under way."""

    job: Job
    env: Environment
    seed: int
    key: int
    """What the keys of its steps are made from."""
    observation: Observation
    steps: int = 0
    reward: float = 0.0
    success: bool | None = None
    pictures: list[Array] = field(default_factory=list)
    can_look_away: bool = False

    def film(self, *, last: bool = False) -> None:
        if self.job.video is not None and (last or self.steps % frame_stride(self.env.fps) == 0):
            self.pictures.append(self.env.render())

    def row(self) -> EpisodeRow:
        job = self.job
        return EpisodeRow(job.env, self.env.task, job.episode, self.seed, self.success, self.steps, self.reward)


class EpisodeRunner:
    """Runs episodes of one split with one actor.

    Args:
        actor: Who acts.
        pool: Where environments come from.
        split: Whose seeds are used.
        seed: The root of all seeds.
        slots: Episodes that run side by side.
        heartbeat: Called after every step of all slots.
        witness: Sees every step, and lives with episodes that fail; without one, a failure ends it all.
        will_look: Whether the actor needs the next pictures of a slot, for environments that can look away; None is
            always.
    """

    def __init__(
        self,
        actor: Actor,
        pool: EnvironmentPool,
        *,
        split: str,
        seed: int,
        slots: int,
        heartbeat: Callable[[], None] | None = None,
        witness: Witness | None = None,
        will_look: Callable[[int], bool] | None = None,
    ) -> None:
        self._actor, self._pool, self._split, self._seed = actor, pool, split, seed
        self._slots = slots if actor.most_slots is None else min(slots, actor.most_slots)
        self._heartbeat, self._witness, self._will_look = heartbeat, witness, will_look
        self.stopwatch = Stopwatch()

    def run(self, jobs: Iterable[Job]) -> Iterator[EpisodeRow]:
        """Yield the row of each episode as it ends."""
        waiting = iter(jobs)
        running: dict[int, _Running] = {}
        with self._actor.session():
            while True:
                for slot in range(self._slots):
                    while slot not in running and (job := next(waiting, None)) is not None:
                        if (begun := self._begin(slot, job)) is not None:
                            running[slot] = begun
                if not running:
                    return
                yield from self._step(running)
                if self._heartbeat is not None:
                    self._heartbeat()

    def _begin(self, slot: int, job: Job) -> _Running | None:
        """Return the episode, or None if it failed at once."""
        began = time.perf_counter()
        env = self._pool.borrow(job.env)
        self._actor.check(env)
        seed = episode_seed(self._seed, self._split, job.episode if job.start is None else job.start)
        key = episode_key(self._seed, self._split, job.episode)
        can_look_away = self._will_look is not None and isinstance(env, CanLookAway)
        if isinstance(env, CanLookAway):
            env.looks = True
        try:
            episode = _Running(job, env, seed, key, env.reset(seed), can_look_away=can_look_away)
            if self._witness is not None:
                self._witness.began(job, env, episode.observation)
        except Exception as error:  # noqa: BLE001 - a simulator may fail in any way
            self._lose(job, env, error)
            return None
        episode.film()
        self._actor.reset(slot)
        self.stopwatch.simulating_s += time.perf_counter() - began
        return episode

    def _lose(self, job: Job, env: Environment, error: Exception) -> None:
        if self._witness is None or isinstance(error, EtudeError):
            raise error
        self._witness.lost(job, error)
        self._pool.discard(env)

    def _step(self, running: dict[int, _Running]) -> Iterator[EpisodeRow]:
        began = time.perf_counter()
        seats = [Seat(slot, e.env, e.observation, fold_more(e.key, e.steps)) for slot, e in running.items()]
        actions = self._actor.act(seats)
        acted = time.perf_counter()
        ended = [seat.slot for seat, action in zip(seats, actions, strict=True) if self._advance(running, seat, action)]
        self.stopwatch.acting_s += acted - began
        self.stopwatch.simulating_s += time.perf_counter() - acted
        self.stopwatch.env_steps += len(seats)
        for slot in ended:
            episode = running.pop(slot)
            if episode.job.video is not None:
                env = episode.env
                write_video(episode.job.video, episode.pictures, env.fps / frame_stride(env.fps))
            self._pool.give(episode.job.env, episode.env)
            yield episode.row()

    def _advance(self, running: dict[int, _Running], seat: Seat, action: Array) -> bool:
        """Take one step of an episode; return whether it has ended. One that fails is taken off its slot."""
        episode = running[seat.slot]
        if episode.can_look_away and self._will_look is not None:
            cast(CanLookAway, episode.env).looks = self._will_look(seat.slot)
        try:
            outcome = episode.env.step(action)
            if self._witness is not None:
                self._witness.saw(episode.job, seat, action, outcome)
        except Exception as error:  # noqa: BLE001 - a simulator may fail in any way
            del running[seat.slot]
            self._lose(episode.job, episode.env, error)
            return False
        episode.observation = outcome.observation
        episode.steps += 1
        episode.reward += outcome.reward
        if outcome.success is not None:
            episode.success = bool(episode.success) or outcome.success
        done = outcome.done or episode.steps >= episode.env.max_steps
        episode.film(last=done)
        return done
