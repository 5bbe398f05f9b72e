"""Rounds of episodes and updates in turn, in the processes that train: exact, and the same on any number of ranks."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from etude.data.replay import LAST, REWARD, ReplayBuffer
from etude.errors import CheckpointError, RolloutError
from etude.rollouts.diaries import timed_pool
from etude.rollouts.measures import timed
from etude.rollouts.playing import Episode, total_steps, worth_keeping
from etude.simulation.episodes import EnvironmentPool

if TYPE_CHECKING:
    from etude.rollouts.online import OnlineSettings
    from etude.trainer import Trainer
    from etude.types.protocols import Place

RECENT = 20
"""Episodes of the policy alone whose success is shown."""


class Rounds:
    """Plays a round of episodes where one is due, and adds what is worth keeping to a buffer.

    Ranks share the episodes of a round and tell each other, so that all buffers are alike.

    Args:
        settings: What is played and what is kept of it.
        buffer: What keeps the episodes.
    """

    def __init__(self, settings: OnlineSettings, buffer: ReplayBuffer) -> None:
        self.settings, self.buffer = settings, buffer
        self.env_steps = 0
        self.all_steps = 0
        """Steps simulated by all ranks."""
        self.played = 0
        """Episodes played by all ranks."""
        self.rounds = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._returns: deque[float] = deque(maxlen=RECENT)
        self._pool: EnvironmentPool | None = None
        self._updates = 0

    def attach(self, trainer: Trainer, place: Place, settings: OnlineSettings) -> None:
        """Learn who acts, and where."""
        self._trainer, self._place, self.settings = trainer, place, settings

    def ready(self, step: int) -> None:
        """Play a round, if one is due."""
        self._updates = step
        due = self.settings.round_at(step)
        if due >= self.rounds:
            with timed(self._trainer.data.timings, "simulate"):  # type: ignore[attr-defined]
                self._play(due)
            self.rounds = due + 1

    def _play(self, number: int) -> None:
        settings, place, session = self.settings, self._place, self._trainer.session
        if self._pool is None:
            self._pool = timed_pool(settings.env, dict(settings.options), settings.step_timeout_s)
        first = number * settings.episodes_per_round
        own = range(first + place.rank, first + settings.episodes_per_round, place.world)
        with session.shown_weights():
            found = settings.play(
                self._trainer.policy, own, seed=place.seed, pool=self._pool,
                heartbeat=lambda: session.pulse.enter("data"),
            )  # fmt: skip
        self.env_steps += total_steps(found)
        if place.world > 1:
            found = [episode for part in session.gather(pack(found)) for episode in unpack(part)]
        if not found:
            raise RolloutError(f"all episodes of round {number} in {settings.env} failed; the log says why")
        for episode in sorted(found, key=lambda one: one["episode"]):
            self._add(episode)

    def _add(self, episode: Episode) -> None:
        settings = self.settings
        self.all_steps += len(episode[REWARD])
        self.played += 1
        if not settings.expert_share(episode["episode"]):
            if "success" in episode:
                self._recent.append(float(episode["success"]))
            self._returns.append(float(episode[REWARD].sum()))
        if worth_keeping(episode, settings.label, settings.keep):
            self.buffer.add(episode, priority=settings.priority(episode))

    def size(self) -> int:
        """Return how many frames there are."""
        return self.buffer.size()

    def sample(self, batch_size: int, **how: Any) -> dict[str, Any]:
        """Draw frames."""
        return self.buffer.sample(batch_size, **how)

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return how recent episodes went, what the buffer holds, and updates per step of the simulator."""
        found: dict[str, float] = {
            "episodes": self.played, "env_steps": self.all_steps, "buffer_frames": self.buffer.size(),
            "buffer_episodes": self.buffer.episodes, "updates_per_env_step": self._updates / max(1, self.all_steps),
        }  # fmt: skip
        for name, recent in (("success", self._recent), ("return", self._returns)):
            if recent:
                found[name] = float(np.mean(recent))
        return {f"online/{name}": (float(value), 1.0) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer, and how far the rounds have come."""
        return {
            "buffer": self.buffer.state_dict(), "rounds": self.rounds, "played": self.played,
            "env_steps": self.all_steps, "recent": list(self._recent), "returns": list(self._returns),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the first rank counts the steps of those before."""
        if "buffer" not in state:
            raise CheckpointError(
                "the checkpoint is of a run on Ray, whose episodes are in its folder replay/; go on with engine: ray"
            )
        self.buffer.load_state_dict(state["buffer"])
        self.rounds, self.played, self.all_steps = state["rounds"], state["played"], state["env_steps"]
        self.env_steps = self.all_steps if self._place.rank == 0 else 0
        self._recent, self._returns = deque(state["recent"], RECENT), deque(state["returns"], RECENT)

    def close(self) -> None:
        """Close the simulators."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def pack(episodes: Sequence[Episode]) -> bytes:
    """Return episodes as bytes, to be sent; nothing in them can be run."""
    arrays: dict[str, Any] = {}
    facts = []
    for number, episode in enumerate(episodes):
        rows = {name: value for name, value in episode.items() if isinstance(value, np.ndarray)}
        arrays |= {f"{number}/rows/{name}": np.ascontiguousarray(value) for name, value in rows.items()}
        arrays |= {f"{number}/{LAST}/{n}": np.ascontiguousarray(v) for n, v in episode.get(LAST, {}).items()}
        facts.append({name: value for name, value in episode.items() if name not in rows and name != LAST})
    return save(arrays, {"facts": json.dumps(facts)}) if arrays else b""


def unpack(content: bytes) -> list[Episode]:
    """Return the episodes that `pack` packed."""
    if not content:
        return []
    length = int.from_bytes(content[:8], "little")
    facts = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["facts"])
    episodes: list[Episode] = [{**one, LAST: {}} for one in facts]
    for name, value in load(content).items():
        number, part, inner = name.split("/", 2)
        episode = episodes[int(number)]
        (episode if part == "rows" else episode[LAST])[inner] = value
    return episodes
