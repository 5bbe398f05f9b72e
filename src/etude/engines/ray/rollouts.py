"""Rollout workers: actors of Ray that play episodes with the newest weights. They may be killed at any time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import nn

from etude.data.replay import REWARD
from etude.engines.ray.actors import Actors
from etude.engines.ray.log_forwarding import forwarding
from etude.engines.ray.outcome import describe
from etude.engines.ray.publication import Follower
from etude.engines.ray.replay import EpisodeFacts
from etude.engines.ray.shipping import unpack
from etude.errors import RolloutError
from etude.rollouts.diaries import timed_pool
from etude.rollouts.online import OnlineSettings
from etude.rollouts.playing import Episode, worth_keeping

POLL_S = 0.02
MOST_FAILED = 10
"""Episodes in a row that may fail before a worker gives up."""


@dataclass(frozen=True)
class RolloutPlan:
    """What a rollout worker does."""

    policy: nn.Module
    settings: OnlineSettings
    seed: int = 0


class RolloutWorker:
    """Plays one episode after the other, each with the newest weights, and adds it to the replay buffer.

    Args:
        number: Its place among the workers; one that takes the place of a lost one has the same.
        parcel: Reference to what is unpacked into a `RolloutPlan`.
        actors: The two actors.
        mailbox: Where what it says goes.
        levels: What the driver wants to hear.
    """

    def __init__(self, number: int, parcel: list[Any], actors: Actors, mailbox: Any, levels: Mapping[str, int]) -> None:
        self._number, self._parcel, self._actors = number, parcel, actors
        self._mailbox, self._levels = mailbox, levels
        self._name = uuid.uuid4().hex
        self._follower: Follower | None = None
        self._infers = True

    def run(self, episodes: int | None = None) -> dict[str, Any]:
        """Play until it is ended, or so many episodes; return the error that it met, in plain words, if it met one."""
        with forwarding(self._mailbox.post.remote, self._levels):
            try:
                self._play(episodes)
            except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it
                return describe(error, self._number)
        return {}

    def _play(self, episodes: int | None) -> None:
        if self._follower is None:
            unpacked: Any = unpack(ray.get(self._parcel[0]), ray.get)
            self._plan: RolloutPlan = unpacked
            self._follower = Follower(self._plan.policy, self._actors.policy_state_manager)
            settings = self._plan.settings
            self._pool = timed_pool(settings.env, dict(settings.options), settings.step_timeout_s)
        settings, replay, follower = self._plan.settings, self._actors.replay_buffer, self._follower
        played = failed = 0
        added: Any = None
        while episodes is None or played < episodes:
            number = ray.get(replay.claim.remote(self._number)) if follower.refresh() else -1
            if added is not None:
                ray.get(added)  # raises what was wrong with the episode
                added = None
            if number < 0:
                time.sleep(POLL_S)
                continue
            found = self._play_one(follower.policy, number)
            failed = 0 if found else failed + 1
            if failed > MOST_FAILED:
                raise RolloutError(f"{failed} episodes of {settings.env} in a row failed; the log says why")
            if not found:
                continue
            # Not waited for: the next claim is served after it.
            added = self._add(settings, found[0], follower.version)
            played += 1
        if added is not None:
            ray.get(added)

    def _play_one(self, policy: nn.Module, number: int) -> list[Episode]:
        """Play an episode; without what autograd keeps of tensors, unless the policy differentiates while it acts."""
        plan = self._plan
        try:
            with torch.inference_mode(self._infers):
                return plan.settings.play(policy, [number], seed=plan.seed, pool=self._pool, seeded_by="episode")
        except RuntimeError:
            if not self._infers:
                raise
        self._infers = False  # torch says it in many ways; an error of another kind comes again
        return self._play_one(policy, number)

    def _add(self, settings: OnlineSettings, episode: Episode, version: int) -> Any:
        number, is_own = episode["episode"], not settings.expert_share(episode["episode"])
        success = float(episode["success"]) if is_own and "success" in episode else None
        facts = EpisodeFacts(len(episode[REWARD]), success, float(episode[REWARD].sum()), version)
        kept = episode if worth_keeping(episode, settings.label, settings.keep) else None
        return self._actors.replay_buffer.add.remote(
            kept, priority=settings.priority(episode), name=f"{self._name}-{number}", facts=facts, worker=self._number
        )
