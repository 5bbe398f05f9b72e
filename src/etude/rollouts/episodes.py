"""Run episodes in slots: each slot is refilled as soon as its episode ends, and nothing acts in an empty one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.rollouts.actors import Actor, Seat
from etude.rollouts.environments import make_environment
from etude.rollouts.environments.base import Array, Environment, Observation
from etude.rollouts.results import EpisodeRow
from etude.rollouts.seeds import action_key, episode_seed
from etude.rollouts.video import frame_stride, write_video


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to run."""

    env: str
    episode: int
    video: Path | None = None
    """Where to leave a film of it."""


@dataclass
class Stopwatch:
    """Where the time goes."""

    acting_s: float = 0.0
    simulating_s: float = 0.0
    env_steps: int = 0


class EnvironmentPool:
    """Makes environments as they are needed, and keeps those that are free for the next episode."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._options = options or {}
        self._free: dict[str, list[Environment]] = {}
        self._made: list[Environment] = []

    def take(self, name: str) -> Environment:
        """Return an environment that nobody uses."""
        if free := self._free.get(name):
            return free.pop()
        made = make_environment(name, **self._options.get(name, {}))
        self._made.append(made)
        return made

    def give(self, name: str, env: Environment) -> None:
        """Give an environment back."""
        self._free.setdefault(name, []).append(env)

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
    observation: Observation
    steps: int = 0
    reward: float = 0.0
    success: bool = False
    pictures: list[Array] = field(default_factory=list)

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
    ) -> None:
        self._actor, self._pool, self._split, self._seed = actor, pool, split, seed
        self._slots = slots if actor.most_slots is None else min(slots, actor.most_slots)
        self._heartbeat = heartbeat
        self.stopwatch = Stopwatch()

    def run(self, jobs: Iterable[Job]) -> Iterator[EpisodeRow]:
        """Yield the row of each episode as it ends."""
        waiting = iter(jobs)
        running: dict[int, _Running] = {}
        with self._actor.session():
            while True:
                for slot in range(self._slots):
                    if slot not in running and (job := next(waiting, None)) is not None:
                        running[slot] = self._begin(slot, job)
                if not running:
                    return
                yield from self._step(running)
                if self._heartbeat is not None:
                    self._heartbeat()

    def _begin(self, slot: int, job: Job) -> _Running:
        began = time.perf_counter()
        env = self._pool.take(job.env)
        self._actor.check(env)
        seed = episode_seed(self._seed, self._split, job.episode)
        episode = _Running(job, env, seed, env.reset(seed))
        episode.film()
        self._actor.reset(slot)
        self.stopwatch.simulating_s += time.perf_counter() - began
        return episode

    def _step(self, running: dict[int, _Running]) -> Iterator[EpisodeRow]:
        began = time.perf_counter()
        seats = [
            Seat(slot, e.env, e.observation, action_key(self._seed, self._split, e.job.episode, e.steps))
            for slot, e in running.items()
        ]
        actions = self._actor.act(seats)
        acted = time.perf_counter()
        ended = [
            slot for slot, action in zip(list(running), actions, strict=True) if self._advance(running[slot], action)
        ]
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

    @staticmethod
    def _advance(episode: _Running, action: Array) -> bool:
        outcome = episode.env.step(action)
        episode.observation = outcome.observation
        episode.steps += 1
        episode.reward += outcome.reward
        episode.success = episode.success or outcome.success
        done = outcome.done or episode.steps >= episode.env.max_steps
        episode.film(last=done)
        return done
