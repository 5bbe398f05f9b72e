"""Record demonstrations: an expert, a script or a policy acts, and the episodes that succeed become a dataset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.data.lerobot.writer import LeRobotWriter
from etude.errors import ConfigError, DataError
from etude.rng import fold
from etude.simulation.actors import EXPERT, Actor, PolicyActor, Seat, make_actor
from etude.simulation.ahead import PlayedAttempt, PlayingAhead
from etude.simulation.environments import make_environment, split_name
from etude.simulation.environments.base import Array, Environment, Observation
from etude.simulation.environments.rendering import has_rendered
from etude.simulation.evaluate import AnyPolicy, allowed_workers
from etude.simulation.journal import Journal
from etude.simulation.seeds import action_key, episode_seed
from etude.types import Feature
from etude.types.names import ACTION

SPLIT = "train"
NEXT_REWARD = "next.reward"
_NOISE_STREAM = 1
_HOPELESS = 20
"""Attempts in a row without a success after which recording gives up."""


@dataclass(frozen=True)
class Recorded:
    """What was recorded."""

    root: Path
    episodes: int
    frames: int
    attempts: int
    """Attempts behind all episodes of the dataset, failures included."""
    env_steps: int
    """Steps simulated by this call."""
    seconds: float


@dataclass(frozen=True)
class Noise:
    """Noise on what is executed, so that demonstrations show the way back from a mistake; never on what is recorded.

    Args:
        scale: Standard deviation, in units of the action.
        share: Share of the episodes that have noise at all.
        rate: Probability that noise begins at a step, where there is none; 1 is noise at every step.
        steps: For how many steps the same noise holds, such as a finger that is pushed aside.
    """

    scale: float = 0.0
    share: float = 1.0
    rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not (self.scale >= 0.0 and 0.0 <= self.share <= 1.0):
            raise ConfigError(f"noise needs a scale from 0 and a share from 0 to 1, got {self.scale} and {self.share}")
        if not (0.0 <= self.rate <= 1.0 and self.steps >= 1):
            raise ConfigError(f"noise needs a rate from 0 to 1 and steps from 1, got {self.rate} and {self.steps}")

    def describe(self) -> list[float]:
        """Return what the journal of a recording keeps of it."""
        held = [] if (self.rate, self.steps) == (1.0, 1) else [self.rate, self.steps]
        return [self.scale, self.share, *held]

    def of_episode(self, seed: int) -> Callable[[Array], Array]:
        """Return what an episode does to its actions."""
        generator = np.random.default_rng(fold(seed, _NOISE_STREAM))
        if not self.scale or generator.random() >= self.share:
            return lambda action: action
        held: list[Array] = []

        def disturb(action: Array) -> Array:
            if not held and (self.rate == 1.0 or generator.random() < self.rate):
                held.extend([self.scale * generator.standard_normal(action.shape)] * self.steps)
            return action + held.pop() if held else action

        return disturb


def record(
    env_name: str | Sequence[str],
    root: Path | str,
    *,
    episodes: int = 50,
    policy: AnyPolicy = EXPERT,
    policy_name: str | None = None,
    seed: int = 0,
    noise: Noise | None = None,
    keep_failures: bool = False,
    rewards: bool = False,
    options: Mapping[str, Any] | None = None,
    images: str = "video",
    workers: int | None = None,
    on_episode: Callable[[int, int], None] | None = None,
) -> Recorded:
    """Record demonstrations as a LeRobot dataset; go on where an interrupted recording stopped.

    Episodes are functions of (environment, policy, seed, noise, attempt): the same call makes the same dataset.

    Args:
        env_name: An environment, such as metaworld/pick-place; several take turns.
        root: Directory of the dataset.
        episodes: Episodes of each environment that the dataset is to have.
        policy: Who demonstrates: "expert" for the environment's own, a function of an observation, or a policy.
        policy_name: How the recording names a policy that is not the expert.
        seed: The root of all seeds; recording draws from the split "train".
        noise: Noise on what is executed.
        keep_failures: Keep episodes that do not succeed, too.
        rewards: Keep what each step earned, as next.reward, for algorithms that learn from rewards.
        options: Parameters of the environments, such as cameras and size.
        images: How pictures are stored: video or image.
        workers: Processes that play episodes; 0 plays them here. None is one for each core where there are cameras.
        on_episode: Called with the number of episodes saved and of attempts made.
    """
    names = [env_name] if isinstance(env_name, str) else list(env_name)
    if episodes < 1 or not names:
        raise ConfigError(f"a recording needs at least one environment and one episode, got {names} and {episodes}")
    noise, root, began, actor = noise or Noise(), Path(root), time.perf_counter(), make_actor(policy)
    settings = {
        "env": names, "policy": policy_name or (policy if isinstance(policy, str) else "function"), "seed": seed,
        "noise": noise.describe(), "keep_failures": keep_failures, "options": _plain(options or {}),
        **({"rewards": True} if rewards else {}),
    }  # fmt: skip
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(make_environment(name, **(options or {})))) for name in names]
        for env in envs:
            actor.check(env)
        features = {**_shared_features(envs, names), **({NEXT_REWARD: Feature((1,), "float32")} if rewards else {})}
        writer = LeRobotWriter(root, features, envs[0].fps, split_name(names[0])[0], images=images)  # type: ignore[arg-type]
        stack.callback(writer.close)
        journal, total = Journal(root, settings, writer.num_episodes), episodes * len(envs)
        session = _Session(envs, actor, writer, journal, seed, noise, keep_failures, rewards)
        if count := _count_workers(workers, actor, envs, total - writer.num_episodes):
            session.ahead = stack.enter_context(PlayingAhead(session.play, keep_failures, count))
        session.record_until(total, on_episode)
        counts = writer.num_episodes, writer.num_frames, session.attempts, session.env_steps
        writer.finalize()
    return Recorded(root, *counts, time.perf_counter() - began)


def record_attempts(
    env_name: str,
    root: Path | str,
    attempts: Sequence[int],
    *,
    settings: Mapping[str, Any],
    policy: AnyPolicy = EXPERT,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    wrap: Callable[[Environment], Environment] | None = None,
    images: str = "video",
    on_episode: Callable[[int, int], None] | None = None,
) -> Recorded:
    """Record those of some attempts that succeed, each tried once; go on where an interrupted recording stopped.

    Args:
        env_name: The environment.
        root: Directory of the dataset.
        attempts: Numbers of episodes of the split "train".
        settings: What the episodes depend on; a dataset with others is refused.
        policy: Who demonstrates.
        seed: The root of all seeds.
        options: Parameters of the environment.
        wrap: Makes of the environment the one that is acted in.
        images: How pictures are stored: video or image.
        on_episode: Called with the number of episodes saved and of attempts made.
    """
    root, began, actor = Path(root), time.perf_counter(), make_actor(policy)
    with ExitStack() as stack:
        env = stack.enter_context(closing(make_environment(env_name, **(options or {}))))
        env = env if wrap is None else wrap(env)
        actor.check(env)
        writer = LeRobotWriter(root, env.spec.features, env.fps, split_name(env_name)[0], images=images)  # type: ignore[arg-type]
        stack.callback(writer.close)
        journal = Journal(root, settings, writer.num_episodes)
        session = _Session([env], actor, writer, journal, seed, Noise(), keep_failures=False)
        stack.enter_context(actor.session())
        done = {*journal.kept, *(attempt for _, attempt in journal.failed)}
        for attempt in attempts:
            if attempt not in done:
                session.record_attempt(0, attempt)
                if on_episode is not None:
                    on_episode(writer.num_episodes, session.attempts)
        counts = writer.num_episodes, writer.num_frames, session.attempts, session.env_steps
        if writer.num_episodes:
            writer.finalize()
    return Recorded(root, *counts, time.perf_counter() - began)


class _Session:
    """A recording under way."""

    def __init__(
        self,
        envs: Sequence[Environment],
        actor: Actor,
        writer: LeRobotWriter,
        journal: Journal,
        seed: int,
        noise: Noise,
        keep_failures: bool,
        rewards: bool = False,
    ) -> None:
        self.envs, self.actor, self.writer, self.journal = envs, actor, writer, journal
        self._seed, self._noise, self._keep_failures, self._rewards = seed, noise, keep_failures, rewards
        self.env_steps = 0
        self.ahead: PlayingAhead | None = None
        """Who plays attempts in other processes; None plays them here."""
        self._total = 0

    @property
    def attempts(self) -> int:
        """Attempts so far, those of earlier sessions included."""
        return len(self.journal.kept) + len(self.journal.failed)

    def record_until(self, total: int, on_episode: Callable[[int, int], None] | None) -> None:
        """Record until the dataset has this many episodes."""
        self._total = total
        with self.actor.session():
            while self.writer.num_episodes < total:
                self.record_next()
                if on_episode is not None:
                    on_episode(self.writer.num_episodes, self.attempts)

    def record_next(self) -> None:
        """Try until an episode succeeds, and save it."""
        lane = self.writer.num_episodes % len(self.envs)
        env = self.envs[lane]
        for _ in range(_HOPELESS):
            attempt = self.journal.next_attempt(lane, len(self.envs))
            if self.record_attempt(lane, attempt):
                return
        raise DataError(
            f"{env.task!r}: {_HOPELESS} attempts in a row failed, the last with seed "
            f"{episode_seed(self._seed, SPLIT, attempt)}; less noise or another policy may help"
        )

    def record_attempt(self, lane: int, attempt: int) -> bool:
        """Play an attempt and save it if it is worth that; return whether it was."""
        wanted = lane, attempt
        played = self.play(wanted) if self.ahead is None else self.ahead.take(wanted, self._coming)
        frames, success, env_steps = played
        self.env_steps += env_steps
        if not success and not self._keep_failures:
            self.journal.fail(lane, attempt)
            return False
        for frame in frames:
            self.writer.add_frame(frame)
        self.journal.keep(attempt)
        self.writer.save_episode(self.envs[lane].task)
        return True

    def _coming(self) -> Iterator[tuple[int, int]]:
        """Yield the attempts that are still to be made if none of them fails."""
        lanes = len(self.envs)
        following = [self.journal.next_attempt(lane, lanes) for lane in range(lanes)]
        for number in range(self.writer.num_episodes, self._total):
            yield number % lanes, following[number % lanes]
            following[number % lanes] += 1

    def play(self, wanted: tuple[int, int]) -> PlayedAttempt:
        """Play an attempt in one of the environments."""
        env, attempt = self.envs[wanted[0]], wanted[1]
        seed = episode_seed(self._seed, SPLIT, attempt)
        disturb = self._noise.of_episode(seed)
        frames: list[Observation] = []
        success = False
        observation = env.reset(seed)
        self.actor.reset(0)
        feature = env.spec[ACTION]
        for step in range(env.max_steps):
            seat = Seat(0, env, observation, action_key(self._seed, SPLIT, attempt, step))
            action = np.asarray(self.actor.act([seat])[0]).reshape(feature.shape).astype(feature.dtype)
            frames.append({**observation, ACTION: action})
            outcome = env.step(disturb(action) if feature.classes is None else action)
            if self._rewards:
                frames[-1][NEXT_REWARD] = np.array([outcome.reward], dtype=np.float32)
            success = success or outcome.success is True
            if outcome.done:
                break
            observation = outcome.observation
        return PlayedAttempt(frames, success, len(frames))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def _count_workers(workers: int | None, actor: Actor, envs: Sequence[Environment], missing: int) -> int:
    """Return how many processes play; none where one core does, or where OpenGL is in use already."""
    if workers is None:
        has_cameras = any(env.spec.with_role("image") for env in envs)
        on_cpu = not isinstance(actor, PolicyActor) or actor.device.type == "cpu"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = cores if has_cameras and on_cpu and not has_rendered() and cores > 1 else 0
    return min(allowed_workers(workers, actor), max(0, missing))


def _shared_features(envs: Sequence[Environment], names: Sequence[str]) -> Mapping[str, Feature]:
    first = envs[0]
    for env, name in zip(envs, names, strict=True):
        if env.fps != first.fps or _shapes(env.spec.features) != _shapes(first.spec.features):
            raise ConfigError(f"{name} and {names[0]} differ in rate or features; record them into separate datasets")
    return first.spec.features


def _shapes(features: Mapping[str, Feature]) -> dict[str, Any]:
    return {name: (feature.shape, feature.dtype) for name, feature in features.items()}
