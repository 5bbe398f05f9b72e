"""`evaluate_policy`: success in simulation, the same whenever and however it is measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from etude.errors import ConfigError
from etude.simulation.actors import Actor, PolicyActor, make_actor
from etude.simulation.environments import make_environment, options_for
from etude.simulation.environments.base import Observation
from etude.simulation.environments.rendering import has_rendered
from etude.simulation.episodes import EnvironmentPool, EpisodeRunner, Job
from etude.simulation.processes import deal, run_in_processes
from etude.simulation.results import EpisodeRow, EvaluationResult
from etude.simulation.seeds import split_code

log = logging.getLogger("etude")

AnyPolicy = nn.Module | str | Callable[[Observation], Any]
SLOTS_ON_GPU = 8


def evaluate_policy(
    policy: AnyPolicy,
    env_name: str | Sequence[str],
    *,
    episodes: int = 50,
    split: str = "test",
    seed: int = 0,
    slots: int | None = None,
    workers: int = 0,
    exact: bool = True,
    video_dir: Path | str | None = None,
    videos: int = 4,
    options: Mapping[str, Any] | None = None,
    tasks: Mapping[str, int] | None = None,
    on_episode: Callable[[EpisodeRow], None] | None = None,
    on_film: Callable[[EvaluationResult], None] | None = None,
    heartbeat: Callable[[], None] | None = None,
) -> EvaluationResult:
    """Run episodes and return how they went.

    The outcome of an episode is a function of the policy, the environment, `seed`, `split` and its number. It depends
    neither on slots nor on workers.

    Args:
        policy: A policy with `select_action`, a function of an observation, or "expert" for the environment's own.
        env_name: An environment, such as metaworld/pick-place, or several for a table of tasks.
        episodes: Episodes of each environment.
        split: Whose seeds: train (the ones recording uses), validation or test.
        seed: The root of all seeds.
        slots: Episodes side by side in each process; None is one on a CPU, eight on a GPU.
        workers: Processes that share the episodes; 0 runs them here.
        exact: Ask the policy for each episode on its own. False asks for all slots at once, which is faster on a GPU,
            and rounds differently for another number of slots.
        video_dir: Where films go; None makes none.
        videos: At most this many films, failures first.
        options: Parameters of the environments; cameras and sizes follow from the policy unless given.
        tasks: Index of each task by its text, for policies that were trained on several.
        on_episode: Called with each row as it comes, in any order.
        on_film: Called with what is found so far: before the first film, and after each.
        heartbeat: Called again and again while episodes run in this process.
    """
    names = [env_name] if isinstance(env_name, str) else list(env_name)
    if episodes < 1 or not names:
        raise ConfigError(f"an evaluation needs at least one environment and one episode, got {names} and {episodes}")
    split_code(split)
    actor = make_actor(policy, exact=exact, tasks=tasks)
    stage = _Stage(actor, _all_options(actor, names, options), split, seed, _count_slots(actor, slots), heartbeat)
    jobs = [Job(name, episode) for name in names for episode in range(episodes)]
    began = time.perf_counter()
    workers = _allowed_workers(workers, actor)
    found = dict.fromkeys(((job.env, job.episode) for job in jobs), None) | _gather(stage, jobs, workers, on_episode)
    rows = tuple(row for row in found.values() if row is not None)
    result = measured = EvaluationResult(rows, split, seed, stage.timing(time.perf_counter() - began))
    if video_dir is not None and videos > 0:
        for result in _film(stage, measured, Path(video_dir), videos, workers):
            if on_film is not None:
                on_film(result)
    return result


def check_environments(
    policy: AnyPolicy,
    env_name: str | Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    tasks: Mapping[str, int] | None = None,
) -> None:
    """Raise if a policy cannot act in an environment: other features, other shapes, or a task it does not know."""
    names = [env_name] if isinstance(env_name, str) else list(env_name)
    actor = make_actor(policy, tasks=tasks)
    for name, given in _all_options(actor, names, options).items():
        env = make_environment(name, **given)
        try:
            actor.check(env)
        finally:
            env.close()


class _Stage:
    """Everything that running episodes needs, and what it cost."""

    def __init__(
        self,
        actor: Actor,
        options: Mapping[str, Mapping[str, Any]],
        split: str,
        seed: int,
        slots: int,
        heartbeat: Callable[[], None] | None,
    ) -> None:
        self.actor, self.options, self.split, self.seed, self.slots = actor, options, split, seed, slots
        self.heartbeat = heartbeat
        self.costs = {"acting_s": 0.0, "simulating_s": 0.0, "env_steps": 0.0}
        self.latencies_s: list[float] = []

    def play(self, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
        """Run episodes in this process; yield rows as plain values, and at last what they cost."""
        pool = EnvironmentPool(self.options)
        runner = EpisodeRunner(
            self.actor, pool, split=self.split, seed=self.seed, slots=self.slots, heartbeat=self.heartbeat
        )
        try:
            for row in runner.run(jobs):
                yield {"row": asdict(row)}
        finally:
            pool.close()
        latencies: list[float] = []
        if isinstance(self.actor, PolicyActor):
            latencies, self.actor.latencies_s = self.actor.latencies_s, []
        yield {"costs": asdict(runner.stopwatch), "latencies_s": latencies}

    def count(self, message: Mapping[str, Any]) -> None:
        """Add up the costs of a process."""
        for name, value in message["costs"].items():
            self.costs[name] += value
        self.latencies_s += message["latencies_s"]

    def timing(self, seconds: float) -> dict[str, float]:
        """Return what the evaluation cost, with the latency of the policy."""
        found = {"seconds": seconds, **self.costs, "env_steps_per_s": self.costs["env_steps"] / max(seconds, 1e-9)}
        if self.latencies_s:
            ms = np.array(self.latencies_s) * 1000
            found |= {"policy_ms_mean": float(ms.mean()), "policy_ms_max": float(ms.max())}
            found |= {f"policy_ms_p{q}": float(np.percentile(ms, q)) for q in (50, 95, 99)}
        return found


def _gather(
    stage: _Stage, jobs: Sequence[Job], workers: int, on_episode: Callable[[EpisodeRow], None] | None
) -> dict[tuple[str, int], EpisodeRow]:
    found = {}
    for row in _play_all(stage, jobs, workers):
        found[row.env, row.episode] = row
        if on_episode is not None:
            on_episode(row)
    return found


def _play_all(stage: _Stage, jobs: Sequence[Job], workers: int) -> Iterator[EpisodeRow]:
    messages = run_in_processes(stage.play, deal(jobs, workers)) if workers else stage.play(jobs)
    for message in messages:
        if "row" in message:
            yield EpisodeRow(**message["row"])
        else:
            stage.count(message)


def _film(
    stage: _Stage, result: EvaluationResult, directory: Path, most: int, workers: int
) -> Iterator[EvaluationResult]:
    """Play the chosen episodes once more, with a camera: rendering all of them would cost more than they do."""
    yield result
    chosen = choose_for_film(result.rows, most)
    paths = {(row.env, row.episode): directory / film_name(row) for row in chosen}
    jobs = [Job(env, episode, path) for (env, episode), path in paths.items()]
    made: set[tuple[str, int]] = set()
    for row in _play_all(stage, jobs, workers):
        key = row.env, row.episode
        if paths[key].name != film_name(row):  # a simulator that does not repeat itself: the film tells what it shows
            paths[key] = paths[key].rename(directory / film_name(row))
        made.add(key)
        yield replace(result, videos=tuple(path for key, path in paths.items() if key in made))


def choose_for_film(rows: Sequence[EpisodeRow], most: int) -> list[EpisodeRow]:
    """Return the episodes worth seeing: failures first, then successes, each environment in its turn."""
    turns: dict[tuple[bool, str], int] = {}
    order = []
    for row in rows:
        turn = turns[row.success, row.env] = turns.get((row.success, row.env), -1) + 1
        order.append((row.success, turn))
    ranked = sorted(range(len(rows)), key=lambda index: (order[index], index))
    return [rows[index] for index in ranked[:most]]


def film_name(row: EpisodeRow) -> str:
    """Return the file name of the film of an episode."""
    plain = "".join(character if character.isalnum() or character in "-_." else "_" for character in row.env)
    return f"{plain}-{row.episode:03d}-{'success' if row.success else 'failure'}.mp4"


def _all_options(actor: Actor, names: Sequence[str], options: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    spec = actor.spec if isinstance(actor, PolicyActor) else None
    return {name: {**(options_for(name, spec) if spec is not None else {}), **(options or {})} for name in names}


def _count_slots(actor: Actor, slots: int | None) -> int:
    if slots is not None:
        if slots < 1:
            raise ConfigError(f"slots must be at least 1, got {slots}")
        return slots
    return SLOTS_ON_GPU if isinstance(actor, PolicyActor) and actor.device.type != "cpu" else 1


def _allowed_workers(workers: int, actor: Actor) -> int:
    if workers < 0:
        raise ConfigError(f"workers must not be negative, got {workers}")
    if workers and isinstance(actor, PolicyActor) and actor.device.type != "cpu":
        raise ConfigError("workers share a policy on a CPU only; use slots for a policy on a GPU")
    if workers and has_rendered():
        log.info("this process has used OpenGL, which its children could not; evaluating without workers")
        return 0
    return workers
