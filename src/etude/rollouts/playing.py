"""Play episodes to learn from: the policy acts, perhaps with noise, and the environment's expert may say what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from etude.data.replay import LAST, REWARD
from etude.errors import ConfigError
from etude.rng import fold
from etude.rollouts.diaries import Diaries, Diary, timed_pool
from etude.rollouts.explore import SPLIT, Explorer
from etude.simulation.actors import PolicyActor, Seat, SeededBy
from etude.simulation.environments import split_name
from etude.simulation.environments.base import Array, Environment, HasExpert
from etude.simulation.episodes import EnvironmentPool, EpisodeRunner, Job
from etude.types.names import ACTION

log = logging.getLogger("etude")

Label = Literal["own", "expert"]
Keep = Literal["success", "all"]
RewardOf = Literal["env", "success"]
Episode = dict[str, Any]
"""Rows by feature name, `reward`, `terminated`, the number `episode`, and under `last` what came after; where the
environment knows success, `success`."""

FIRST_START = 1 << 20
"""Episodes begin as this one of the split "train" and those after it: demonstrations began as the first ones."""
_TURN_STREAM, _NOISE_STREAM = 1, 2
_SLOTS = 8
"""Episodes that a policy which draws its actions plays side by side."""


class Apprentice:
    """A policy that acts with noise, and an expert that may say what it would do, and take a turn.

    Args:
        inner: The policy as an actor.
        label: Whose actions are to be learned.
        noise: Deviation of the noise on what is executed, in units of the normalised action.
        noise_steps: Steps for which a draw of it holds.
    """

    def __init__(self, inner: PolicyActor, label: Label, noise: float, noise_steps: int = 1) -> None:
        self._inner, self._label = inner, label
        self._scale = noise * action_width(inner.policy) if noise else None
        self._noise_steps = noise_steps
        self._held: dict[int, tuple[int, Array]] = {}
        """The noise of each slot, and for how many steps more it holds."""
        self.most_slots = inner.most_slots
        self.expert_share = 0.0
        """Share of the steps at which the expert acts."""
        self.labels: dict[int, Array] = {}
        """What the expert would have done at the last step of each slot."""

    def session(self) -> AbstractContextManager[Any]:
        """Act as the policy does."""
        return self._inner.session()

    def check(self, env: Environment) -> None:
        """Require an expert where one is asked, and an environment that the policy knows."""
        self._inner.check(env)
        if self._label == "expert":
            require_expert(env, env.task)
        if self._scale is not None and env.spec[ACTION].classes is not None:
            raise ConfigError(
                f"noise is added to numbers; the action of {env.task!r} is one of several, so leave it out"
            )

    def reset(self, slot: int) -> None:
        """Forget what was in a slot."""
        self._inner.reset(slot)
        self._held.pop(slot, None)

    def act(self, seats: Sequence[Seat]) -> list[Array]:
        """Return the action of each episode: the policy's with noise, or the expert's where it is its turn."""
        chosen = self._inner.act(seats) if self.expert_share < 1.0 else [None] * len(seats)
        return [self._settle(seat, own) for seat, own in zip(seats, chosen, strict=True)]

    def _settle(self, seat: Seat, own: Array | None) -> Array:
        feature = seat.env.spec[ACTION]
        if self._label == "expert":
            wanted = np.asarray(cast(HasExpert, seat.env).expert_action())
            self.labels[seat.slot] = wanted.reshape(feature.shape).astype(feature.dtype)
            turn = fold(seat.key, _TURN_STREAM) * 2.0**-64
            own = self.labels[seat.slot] if own is None or turn < self.expert_share else own
        assert own is not None
        action = np.asarray(own).reshape(feature.shape).astype(feature.dtype)
        if self._scale is None:
            return action
        noisy = action + np.broadcast_to(self._scale, feature.shape) * self._noise(seat, feature.shape)
        stats = feature.stats or {}
        if "min" in stats and "max" in stats:
            noisy = np.clip(noisy, np.asarray(stats["min"]), np.asarray(stats["max"]))
        return noisy.astype(feature.dtype)

    def _noise(self, seat: Seat, shape: tuple[int, ...]) -> Array:
        """Return standard normal noise: that of the step before, or new where it has held for long enough."""
        left, drawn = self._held.get(seat.slot, (0, None))
        if drawn is None or not left:
            left = self._noise_steps
            drawn = np.random.default_rng(fold(seat.key, _NOISE_STREAM)).standard_normal(shape)
        self._held[seat.slot] = (left - 1, drawn)
        return drawn


def play_episodes(
    policy: nn.Module,
    env: str,
    episodes: Sequence[int],
    *,
    label: Label = "own",
    noise: float = 0.0,
    noise_steps: int = 1,
    seed: int = 0,
    expert_share: Callable[[int], float] | None = None,
    reward: RewardOf = "env",
    pool: EnvironmentPool | None = None,
    options: Mapping[str, Any] | None = None,
    heartbeat: Callable[[], None] | None = None,
    tasks: Mapping[str, int] | None = None,
    seeded_by: SeededBy = "step",
) -> list[Episode]:
    """Play whole episodes with the policy as it is, and return them as a `ReplayBuffer` takes them.

    They are functions of (policy, seed, number), and draw from the split "train". One that fails is left out.

    Args:
        policy: Who acts: drawing its actions if it can (`sample`), as it would on a robot if not (`select_action`).
        env: The environment.
        episodes: The numbers of the episodes.
        label: Keep the actions that were executed (own), or those that the environment's expert would have taken.
        noise: Deviation of the noise on what is executed, in units of the normalised action.
        noise_steps: Steps for which a draw of the noise holds.
        seed: The root of all seeds.
        expert_share: Share of the steps at which the expert acts itself, by episode; None is never.
        reward: That of the environment (env), or 1 at the step that succeeds and 0 elsewhere (success).
        pool: Where simulators come from; one of its own, which is closed at the end, unless given.
        options: Parameters of the environment, without a pool.
        heartbeat: Called after every step.
        tasks: Index of each task by its text, for policies that know several.
        seeded_by: Whether the global random generators begin anew at each step or at the first of each episode.
    """
    draws = callable(getattr(policy, "sample", None))
    inner = Explorer(policy, _SLOTS) if draws else PolicyActor(policy, tasks=tasks, seeded_by=seeded_by)
    actor = Apprentice(inner, label, noise, noise_steps)
    diaries = Diaries(inner.tensors, lambda seat: actor.labels.get(seat.slot))
    own_pool = timed_pool(env, dict(options or {}), None) if pool is None else None
    runner = EpisodeRunner(
        actor, own_pool or cast(EnvironmentPool, pool), split=SPLIT, seed=seed, slots=_SLOTS if draws else 1,
        heartbeat=heartbeat, witness=diaries,
    )  # fmt: skip
    shares = expert_share if expert_share is not None and label == "expert" else lambda _: 0.0
    try:
        for share, numbers in groupby(episodes, shares):
            actor.expert_share = share
            for _ in runner.run(Job(env, number, start=FIRST_START + number) for number in numbers):
                pass
    finally:
        if own_pool is not None:
            own_pool.close()
    for number, reason in diaries.failures.items():
        log.warning("episode %d of %s failed and is left out: %s", number, env, reason)
    return [as_episode(number, diary, label, reward) for number, diary in sorted(diaries.diaries.items())]


def as_episode(number: int, diary: Diary, label: Label, reward: RewardOf) -> Episode:
    """Return a diary as a `ReplayBuffer` takes it."""
    seen = {name: torch.stack([one[name] for one in diary.seen]).numpy() for name in diary.seen[0]}
    rewards = np.array(diary.rewards, dtype=np.float32)
    known = [success for success in diary.successes if success is not None]
    if reward == "success":
        rewards = np.array([bool(success) for success in diary.successes], dtype=np.float32)
    return {
        **{name: rows[:-1] for name, rows in seen.items()},
        ACTION: np.stack(diary.notes if label == "expert" else diary.actions),
        REWARD: rewards, "terminated": diary.terminated, "episode": number,
        **({"success": any(known)} if known else {}),
        LAST: {name: rows[-1] for name, rows in seen.items()},
    }  # fmt: skip


def worth_keeping(episode: Episode, label: Label, keep: Keep) -> bool:
    """Tell whether there is something to learn from an episode: what an expert said always, own deeds if they pay."""
    return label == "expert" or keep == "all" or bool(episode.get("success"))


def falling_share(warmup_episodes: int, episode: int) -> float:
    """Return the share of the steps at which the expert acts: all of the first episode, none after the warm-up."""
    return max(0.0, 1.0 - episode / warmup_episodes) if warmup_episodes else 0.0


def require_expert(env: Any, name: str) -> None:
    """Refuse an environment, or a class of them, that has nobody to ask."""
    if not hasattr(env, "expert_action"):
        raise ConfigError(
            f"label: expert needs an environment with an expert, and {name} comes without one; use label: own, or an "
            "environment that has expert_action()"
        )


def require_expert_of(env: str) -> None:
    """Refuse the name of an environment that is known to have nobody to ask, before one is made."""
    from etude.registry import ENVIRONMENT_REGISTRY

    kind = ENVIRONMENT_REGISTRY.get(split_name(env)[0])
    if isinstance(kind, type):
        require_expert(kind, env)


def action_width(policy: nn.Module) -> Array:
    """Return what one unit of the normalised action is in the data's units, for each of its dimensions."""
    normalizer: Any = getattr(policy, "normalizer", None)
    name = getattr(normalizer, "action_name", None)
    if name is None:
        return np.ones(1)
    width: Array = normalizer.get_buffer(f"{name.replace('.', '__')}__width").detach().cpu().numpy()
    return width


def total_steps(episodes: Sequence[Episode]) -> int:
    """Return how many steps some episodes took together."""
    return sum(len(episode[REWARD]) for episode in episodes)
