"""`evaluate_policy`: success in simulation, the same whenever and however it is measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from etude.errors import ConfigError, EtudeError
from etude.policies.origin import origin_of
from etude.runs.directory import Run
from etude.simulation.actors import Actor, PolicyActor, make_actor
from etude.simulation.demonstrations import Demonstrations, find_dataset, read_demonstrations
from etude.simulation.diagnosis import Diagnosis, DiagnosisOptions, diagnose
from etude.simulation.environments import make_environment, options_for
from etude.simulation.environments.base import Environment, Observation
from etude.simulation.environments.rendering import has_rendered
from etude.simulation.episodes import EnvironmentPool, EpisodeRunner, Job
from etude.simulation.processes import deal, run_in_processes
from etude.simulation.results import EpisodeRow, EvaluationResult, film_name
from etude.simulation.seeds import split_code
from etude.simulation.traces import EpisodeTrace
from etude.simulation.watching import EpisodeWatch

log = logging.getLogger("etude")

AnyPolicy = nn.Module | str | Callable[[Observation], Any]
SLOTS_ON_GPU = 8


def evaluate_policy(
    policy: AnyPolicy,
    env_name: str | Sequence[str],
    *,
    episodes: int | Sequence[int] = 50, split: str = "test", seed: int = 0,
    slots: int | None = None, workers: int = 0, exact: bool = True,
    video_dir: Path | str | None = None, videos: int = 4,
    options: Mapping[str, Any] | None = None, tasks: Mapping[str, int] | None = None,
    wrap: Callable[[Environment], Environment] | None = None, diagnosis: DiagnosisOptions | None = None,
    on_episode: Callable[[EpisodeRow], None] | None = None,
    on_film: Callable[[EvaluationResult], None] | None = None, heartbeat: Callable[[], None] | None = None,
) -> EvaluationResult:  # fmt: skip
    """Run episodes and return how they went.

    The outcome of an episode is a function of the policy, the environment, `seed`, `split` and its number. It depends
    neither on slots nor on workers.

    Args:
        policy: A policy with `select_action`, a function of an observation, or "expert" for the environment's own.
        env_name: An environment, such as metaworld/pick-place, or several for a table of tasks.
        episodes: Episodes of each environment, or the numbers of those to run.
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
        wrap: Makes of each environment the one that is acted in, such as one that disturbs.
        on_episode: Called with each row as it comes, in any order.
        on_film: Called with what is found so far: before the first film, and after each.
        heartbeat: Called again and again while episodes run in this process.
        diagnosis: What to keep beside the outcomes, to tell why episodes failed; None keeps nothing, and changes none.
    """
    names = [env_name] if isinstance(env_name, str) else list(env_name)
    numbers = range(episodes) if isinstance(episodes, int) else episodes
    if not numbers or not names:
        raise ConfigError(f"an evaluation needs at least one environment and one episode, got {names} and {episodes}")
    split_code(split)
    actor = make_actor(policy, exact=exact, tasks=tasks)
    given, slots = environment_options(actor, names, options), _count_slots(actor, slots)
    stage = _Stage(actor, given, split, seed, slots, heartbeat, wrap)
    stage.samples = None if diagnosis is None else diagnosis.samples
    jobs = [Job(name, episode) for name in names for episode in numbers]
    began = time.perf_counter()
    workers = allowed_workers(workers, actor)
    rows = _gather(stage, jobs, workers, on_episode)
    timing = stage.timing(time.perf_counter() - began)
    why = None if diagnosis is None else explain_failures(policy, rows, stage.traces, diagnosis)
    result = measured = EvaluationResult(rows, split, seed, timing, (), str(origin_of(policy) or ""), why)
    if video_dir is not None and videos > 0:
        stage.samples = diagnosis.film_samples if diagnosis is not None and diagnosis.film_samples else None
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
    for name, given in environment_options(actor, names, options).items():
        env = make_environment(name, **given)
        try:
            actor.check(env)
        finally:
            env.close()


def explain_failures(
    policy: AnyPolicy,
    rows: Sequence[EpisodeRow],
    traces: Mapping[tuple[str, int], EpisodeTrace],
    options: DiagnosisOptions,
) -> Diagnosis:
    """Return why episodes failed, beside the demonstrations that the policy's run names."""
    root, origin = options.demonstrations, origin_of(policy)
    if root is None and origin is not None:
        with suppress(EtudeError, OSError):  # without the run's configuration there is less to tell
            root = find_dataset(Run(origin.run).read_config())
    known: dict[str, Demonstrations | str] = {}
    for row in rows:
        if root is not None and row.env not in known and (trace := traces.get((row.env, row.episode))) is not None:
            known[row.env] = read_demonstrations(root, trace.features, row.task)
    return diagnose(rows, traces, known)


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
        wrap: Callable[[Environment], Environment] | None = None,
    ) -> None:
        self.actor, self.options, self.split, self.seed, self.slots = actor, options, split, seed, slots
        self.heartbeat, self.wrap = heartbeat, wrap
        self.costs = {"acting_s": 0.0, "simulating_s": 0.0, "env_steps": 0.0}
        self.latencies_s: list[float] = []
        self.samples: int | None = None
        """Plans to draw each time while episodes are watched; None watches none."""
        self.traces: dict[tuple[str, int], EpisodeTrace] = {}

    def play(self, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
        """Run episodes in this process; yield rows as plain values, and at last what they cost."""
        wrap = self.wrap
        make = make_environment if wrap is None else lambda name, **given: wrap(make_environment(name, **given))
        pool = EnvironmentPool(self.options, make)
        watch = None if self.samples is None else EpisodeWatch(self.actor, self.samples)
        runner = EpisodeRunner(
            self.actor, pool, split=self.split, seed=self.seed, slots=self.slots, heartbeat=self.heartbeat,
            witness=watch, will_look=self.actor.will_look if isinstance(self.actor, PolicyActor) else None,
        )  # fmt: skip
        try:
            with nullcontext() if watch is None else watch.listening():
                for row in runner.run(jobs):
                    kept = {} if watch is None else {"trace": watch.take(row.env, row.episode).to_message()}
                    yield {"row": asdict(row), **kept}
        finally:
            pool.close()
        latencies: list[float] = []
        if isinstance(self.actor, PolicyActor):
            latencies, self.actor.latencies_s = self.actor.latencies_s, []
        yield {"costs": asdict(runner.stopwatch), "latencies_s": latencies}

    def keep(self, row: EpisodeRow, trace: EpisodeTrace) -> None:
        """Keep the trace of an episode; of one that is played once more, only the samples are new."""
        before = self.traces.setdefault((row.env, row.episode), trace)
        if len(before.steps) == len(trace.steps):
            before.uncertainty = trace.uncertainty

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
) -> tuple[EpisodeRow, ...]:
    """Return the row of each job, in their order, whatever the order in which they come."""
    found: dict[tuple[str, int], EpisodeRow] = {}
    for row in _play_all(stage, jobs, workers):
        found[row.env, row.episode] = row
        if on_episode is not None:
            on_episode(row)
    return tuple(found[key] for key in dict.fromkeys((job.env, job.episode) for job in jobs) if key in found)


def _play_all(stage: _Stage, jobs: Sequence[Job], workers: int) -> Iterator[EpisodeRow]:
    messages = run_in_processes(stage.play, deal(jobs, workers)) if workers else stage.play(jobs)
    for message in messages:
        if "row" in message:
            row = EpisodeRow(**message["row"])
            if "trace" in message:
                stage.keep(row, EpisodeTrace.from_message(message["trace"]))
            yield row
        else:
            stage.count(message)


def _film(
    stage: _Stage, result: EvaluationResult, directory: Path, most: int, workers: int
) -> Iterator[EvaluationResult]:
    """Play the chosen episodes once more, with a camera: rendering all of them would cost more than they do."""
    yield result
    groups = [] if result.diagnosis is None else result.diagnosis.groups
    chosen = choose_for_film(
        result.rows, most, {(one.env, number): one.kind for one in groups for number in one.episodes}
    )
    paths = {(row.env, row.episode): directory / film_name(row) for row in chosen}
    jobs = [Job(env, episode, path) for (env, episode), path in paths.items()]
    made: set[tuple[str, int]] = set()
    for row in _play_all(stage, jobs, workers):
        key = row.env, row.episode
        if paths[key].name != film_name(row):  # a simulator that does not repeat itself: the film tells what it shows
            paths[key] = paths[key].rename(directory / film_name(row))
        made.add(key)
        yield replace(result, videos=tuple(path for key, path in paths.items() if key in made))


def choose_for_film(
    rows: Sequence[EpisodeRow], most: int, kinds: Mapping[tuple[str, int], str] | None = None
) -> list[EpisodeRow]:
    """Return the episodes worth seeing: failures first, then successes, each environment and each kind in its turn.

    Args:
        rows: How the episodes went.
        most: How many to return.
        kinds: What went wrong in each failure, where that is known.
    """
    turns: dict[tuple[bool, str, str], int] = {}
    order = []
    for row in rows:
        went_well = row.success is not False
        lane = went_well, row.env, (kinds or {}).get((row.env, row.episode), "")
        turn = turns[lane] = turns.get(lane, -1) + 1
        order.append((went_well, turn))
    ranked = sorted(range(len(rows)), key=lambda index: (order[index], index))
    return [rows[index] for index in ranked[:most]]


def environment_options(
    actor: Actor, names: Sequence[str], options: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return the parameters of each environment: those with which it shows what the policy knows, and those given."""
    spec = actor.spec if isinstance(actor, PolicyActor) else None
    return {name: {**(options_for(name, spec) if spec is not None else {}), **(options or {})} for name in names}


def _count_slots(actor: Actor, slots: int | None) -> int:
    if slots is not None:
        if slots < 1:
            raise ConfigError(f"slots must be at least 1, got {slots}")
        return slots
    return SLOTS_ON_GPU if isinstance(actor, PolicyActor) and actor.device.type != "cpu" else 1


def allowed_workers(workers: int, actor: Actor) -> int:
    """Return how many processes may share the episodes; refuse what cannot be shared."""
    if workers < 0:
        raise ConfigError(f"workers must not be negative, got {workers}")
    if workers and isinstance(actor, PolicyActor) and actor.device.type != "cpu":
        raise ConfigError("workers share a policy on a CPU only; use slots for a policy on a GPU")
    if workers and has_rendered():
        log.info("this process has used OpenGL, which its children could not; going on without workers")
        return 0
    return workers
