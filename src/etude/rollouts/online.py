"""Data that grows while it is learned from: rounds of episodes fill a replay buffer, and every batch mixes it in.

Each batch holds exactly its share of rows that were played, beside demonstrations; which ones is a function of (seed,
step) and of what was there. A round is whole episodes, so that a checkpoint never needs the inside of a simulator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from etude.data.coerce import as_data
from etude.data.fetch import Placed
from etude.data.histories import ImageWindow, Window, choose_windows
from etude.data.replay import ReplayBuffer
from etude.errors import ConfigError, DataError
from etude.rng import STREAM_REPLAY, fold
from etude.rollouts.demonstrated import demonstrated_episodes
from etude.rollouts.playing import (
    Episode,
    Keep,
    Label,
    RewardOf,
    falling_share,
    play_episodes,
    require_expert,
    require_expert_of,
)
from etude.simulation.actors import require_fit
from etude.simulation.environments import make_environment, options_for
from etude.types import DataSpec
from etude.types.names import ACTION
from etude.types.protocols import Data, Place

if TYPE_CHECKING:
    from etude.trainer import Trainer

_DEMONSTRATED, _PLAYED = 0, 1
"""Streams of what is drawn for a step."""


@dataclass(frozen=True)
class OnlineSettings:
    """What is played and what is kept of it.

    Args:
        env: An environment, such as metaworld/pick-place or gym:Pendulum-v1.
        options: Parameters of the environment; those that show what the demonstrations have unless given.
        label: Learn from what the policy did (own), or from what the environment's expert would have done (expert).
        keep: With own, the episodes to keep: those that succeed (success), or all.
        reward: What is kept as the reward: that of the environment (env), or 1 where it succeeds and 0 elsewhere.
        episodes_per_round: Episodes of one round, over all ranks.
        updates_per_round: Optimizer steps from one round to the next.
        start_after: Optimizer steps on demonstrations alone before the first round.
        warmup_episodes: With expert, episodes in which the expert also acts, at a share of the steps that falls to 0.
        noise: Deviation of noise on what is executed, in units of the normalised action.
        noise_steps: Steps for which a draw of the noise holds.
        step_timeout_s: Seconds that one step of the simulator may take; None for no limit.
        workers: Processes that play, where rounds are not played in turn with updates.
    """

    env: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: Label = "own"
    keep: Keep = "success"
    reward: RewardOf = "env"
    episodes_per_round: int = 4
    updates_per_round: int = 200
    start_after: int = 0
    warmup_episodes: int = 20
    noise: float = 0.0
    noise_steps: int = 1
    step_timeout_s: float | None = 10.0
    workers: int = 2

    def __post_init__(self) -> None:
        for name, known in (("label", ("own", "expert")), ("keep", ("success", "all")), ("reward", ("env", "success"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"online.{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")
        least = {
            "episodes_per_round": 1, "updates_per_round": 1, "start_after": 0, "warmup_episodes": 0, "noise": 0,
            "noise_steps": 1,
        }  # fmt: skip
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ConfigError(f"online.{name} must be at least {bound}, got {getattr(self, name)}")
        if self.label == "expert":
            require_expert_of(self.env)

    def expert_share(self, episode: int) -> float:
        """Return the share of an episode's steps at which the expert acts."""
        return falling_share(self.warmup_episodes, episode) if self.label == "expert" else 0.0

    def round_at(self, step: int) -> int:
        """Return the round that must have been played before a step; -1 before the first."""
        return (step - self.start_after) // self.updates_per_round if step >= self.start_after else -1

    def play(self, policy: Any, episodes: Sequence[int], **how: Any) -> list[Episode]:
        """Play episodes by their numbers; see `play_episodes`."""
        return play_episodes(
            policy, self.env, episodes, label=self.label, noise=self.noise, noise_steps=self.noise_steps,
            reward=self.reward, expert_share=self.expert_share, **how,
        )  # fmt: skip

    def priority(self, episode: Mapping[str, Any]) -> float:
        """Return how often an episode is drawn where sampling is prioritised: more where there is more to learn.

        An expert's words count most where the policy failed, deeds of its own where they succeeded.
        """
        return 4.0 if bool(episode.get("success")) != (self.label == "expert") else 1.0


class ReplaySource(Protocol):
    """Where rows that were played come from."""

    env_steps: int
    """Steps simulated for this rank."""

    def attach(self, trainer: Trainer, place: Place, settings: OnlineSettings) -> None:
        """Learn who acts, and where."""

    def ready(self, step: int) -> None:
        """Return when there is what this step is to learn from."""

    def size(self) -> int:
        """Return how many frames there are."""

    def sample(self, batch_size: int, **how: Any) -> dict[str, Any]:
        """Draw frames, as `ReplayBuffer.sample` does."""

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return what there is to say about it: means and their weights, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""

    def close(self) -> None:
        """End what was started."""


class OnlineData(Placed):
    """Demonstrations and what the policy plays while it learns, in every batch.

    Args:
        demonstrations: Anything that the Trainer takes as data; None learns from what is played alone.
        settings: What is played and what is kept of it.
        share: Share of each batch that was played, between 0 and 1; None where there are no demonstrations.
        buffer: What keeps the episodes.
        source: Where the rows that were played come from; rounds in this process unless given.
    """

    has_validation = False

    def __init__(
        self,
        demonstrations: Any,
        settings: OnlineSettings,
        *,
        share: float | None = 0.5,
        buffer: ReplayBuffer | None = None,
        source: ReplaySource | None = None,
    ) -> None:
        from etude.rollouts.rounds import Rounds

        if demonstrations is None and share is not None:
            raise ConfigError("online.share is a share beside demonstrations, and there are none; leave it out")
        if demonstrations is not None and (share is None or not 0 < share < 1):
            raise ConfigError(
                f"online.share must lie between 0 and 1, got {share}; without demonstrations leave out data and share, "
                "and without anything played leave out online"
            )
        if demonstrations is None and settings.start_after:
            raise ConfigError("online.start_after counts steps on demonstrations, and there are none; leave it out")
        if demonstrations is None and settings.label == "own" and settings.keep == "success":
            raise ConfigError("without demonstrations a policy has no success to keep; set online.keep: all")
        self.demonstrations: Data | None = None if demonstrations is None else as_data(demonstrations)
        self.settings, self.share = settings, 1.0 if share is None else share
        self.buffer = ReplayBuffer() if buffer is None else buffer
        self.source: ReplaySource = Rounds(settings, self.buffer) if source is None else source
        self.timings: dict[str, float] = {}
        self.metrics: dict[str, tuple[float, float]] = {}
        self._windows: dict[str, list[int]] = {}
        self._how: dict[str, Any] = {}
        self._env_spec: DataSpec | None = None
        self._shown: ReplayBuffer | None = None
        """Demonstrations as episodes, for algorithms that learn from transitions."""

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> DataSpec | None:
        """The features of the demonstrations with their statistics, or those of the environment."""
        return self.env_spec if self.demonstrations is None else self.demonstrations.spec

    @property
    def env_spec(self) -> DataSpec:
        """The features of the environment, pictures as (channels, height, width)."""
        if self._env_spec is None:
            self._env_spec = self._look_at_environment()
        return self._env_spec

    @property
    def norm_stats(self) -> Any:
        """What batches are normalised by, where the demonstrations came with it."""
        return getattr(self.demonstrations, "norm_stats", None)

    @property
    def env_steps(self) -> int:
        """Steps simulated for this rank."""
        return self.source.env_steps

    def use_windows(self, observation: Window = None, action: Window = None, images: ImageWindow = "alike") -> None:
        """Give observations and actions a window, as distances in frames, wherever they come from."""
        if self.demonstrations is not None:
            choose_windows(_Wants(observation, action, images), self.demonstrations)
        self._windows = {}
        for name, feature in self.env_spec.features.items():
            wanted = action if feature.role == "action" else observation
            if feature.role == "image" and images != "alike":
                wanted = images
            if wanted is not None:
                self._windows[name] = [int(step) for step in wanted]
        self._how = {"windows": self._windows}

    def require_room(self, batch_size: int, ranks: int = 1) -> None:
        """Refuse a batch that cannot be cut as asked, or that the buffer cannot fill."""
        rows = self.share * batch_size
        if abs(rows - round(rows)) > 1e-9 or not round(rows):
            raise ConfigError(
                f"online.share {self.share:g} of a batch of {batch_size} is {rows:g} rows; choose a share that is a "
                "whole number of them"
            )
        needed = round(rows) * ranks
        if self.buffer.max_frames < needed:
            raise ConfigError(
                f"online.buffer.max_frames is {self.buffer.max_frames}, less than the {needed} rows of a batch that "
                "are drawn from it; make the buffer larger"
            )
        known = self._env_spec if self.demonstrations is None else self.demonstrations.spec
        least = needed * (0 if known is None else _frame_bytes(known))
        if self.buffer.max_bytes < least:
            raise ConfigError(
                f"online.buffer.max_bytes is {self.buffer.max_bytes}, less than the {least} bytes of the {needed} rows "
                "of a batch that are drawn from it; make the buffer larger"
            )

    def require_ranks(self, ranks: int, *, is_sharded: bool = False) -> None:
        """Refuse ranks that would have nothing to play, or no whole policy to play with."""
        if is_sharded and ranks > 1:
            raise ConfigError("a policy whose weights are spread over ranks cannot act; train online with DDP")
        if self.settings.episodes_per_round < ranks:
            raise ConfigError(
                f"online.episodes_per_round is {self.settings.episodes_per_round}, too few for {ranks} ranks"
            )

    # -- as Data -------------------------------------------------------------------------------------------------------

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        _ = self.env_spec  # refused here if it does not fit
        self.require_room(place.batch_size, place.world * place.accumulate)
        self.require_ranks(place.world)
        self._place = place
        self._rows = round(self.share * place.batch_size)
        if self.demonstrations is not None:
            self.demonstrations.open(replace(place, batch_size=place.batch_size - self._rows))

    def _look_at_environment(self) -> DataSpec:
        """Make one simulator to see what it shows, and refuse it if that does not fit."""
        settings, given = self.settings, None if self.demonstrations is None else self.demonstrations.spec
        chosen = {} if given is None else options_for(settings.env, given)
        self.settings = settings = replace(settings, options={**chosen, **settings.options})
        env = make_environment(settings.env, **settings.options)
        try:
            if given is not None:
                require_fit(given, env, "the demonstrations have")
            if settings.label == "expert":
                require_expert(env, settings.env)
            pictures = {n: replace(f, shape=(f.shape[2], *f.shape[:2])) for n, f in env.spec.with_role("image").items()}
            return DataSpec({**env.spec.features, **pictures}, env.spec.fps)
        finally:
            env.close()

    def attach(self, trainer: Trainer) -> None:
        """Learn who acts, and what the algorithm learns from."""
        is_sharded = any(hasattr(weight, "full_tensor") for weight in trainer.policy.parameters())
        self.require_ranks(self.place.world, is_sharded=is_sharded)
        algorithm: Any = trainer.algorithm
        if getattr(algorithm, "wants_transitions", False):
            asked = {name: getattr(algorithm, name) for name in ("n_step", "gamma") if hasattr(algorithm, name)}
            self._how = {"transitions": True, **asked}
            if self.demonstrations is not None:
                self._shown = demonstrated_episodes(self.demonstrations, self.env_spec, self.settings.reward)
        self.source.attach(trainer, self.place, self.settings)

    def take(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches, after a round of episodes where one is due."""
        place = self.place
        self.source.ready(step)
        shown = None if self._shown is not None or self.demonstrations is None else self.demonstrations.take(step)
        is_empty = not self.source.size()
        if is_empty and self.demonstrations is None:
            raise DataError("nothing that was played is worth keeping, and there are no demonstrations to learn from")
        micros = []
        for number in range(place.accumulate):
            place_of_micro = number * place.world + place.rank
            parts = []
            if shown is not None:
                parts.append(shown[number])
            elif self._shown is not None:
                rows = place.batch_size - self._rows
                parts.append(self._draw(self._shown, step, _DEMONSTRATED, rows, place_of_micro))
            if not is_empty:
                parts.append(self._draw(self.source, step, _PLAYED, self._rows, place_of_micro))
            micros.append(_joined(parts))
        self.metrics = {**self.source.metrics(), "online/share": (0.0 if is_empty else self.share, 1.0)}
        return micros

    def _draw(self, source: Any, step: int, stream: int, rows: int, number: int) -> dict[str, Tensor]:
        key = fold(self.place.seed, STREAM_REPLAY, step, stream)
        found = source.sample(rows, key=key, first=number * rows, **self._how)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def ids(self, step: int) -> Sequence[Any]:
        """Return the sample ids of each micro-batch; of what was played, the places in the draw of its step."""
        place, rows = self.place, self._rows
        shown = None if self._shown is not None or self.demonstrations is None else self.demonstrations.ids(step)
        found = []
        for number in range(place.accumulate):
            first = (number * place.world + place.rank) * rows
            played = [f"played {at} of step {step}" for at in range(first, first + rows)]
            found.append([*(shown[number] if shown is not None else []), *played])
        return found

    def epochs(self, step: int) -> float:
        """Return how many epochs of the demonstrations `step` optimizer steps amount to; without any, none."""
        return 0.0 if self.demonstrations is None else self.demonstrations.epochs(step)

    def close(self) -> None:
        """End the workers, and close the simulators."""
        self.source.close()
        if self.demonstrations is not None:
            self.demonstrations.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what was played, and how far."""
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what was played."""
        self.source.load_state_dict(state)


class _Wants:
    """The windows of a policy, to be passed on."""

    def __init__(self, observation: Window, action: Window, images: ImageWindow) -> None:
        self.observation_delta_indices, self.action_delta_indices = observation, action
        alike = images == "alike"
        self.windows = {"observation": observation, "action": action, "images": observation if alike else images}


def _frame_bytes(spec: DataSpec) -> int:
    """Return what a frame that is played takes at least: what is seen, pictures as bytes, and the action."""
    kept = [one for one in spec.features.values() if one.role in ("state", "environment", "image", "action")]
    return sum(math.prod(one.shape) * (1 if one.role == "image" else _item_bytes(one.dtype)) for one in kept)


def _item_bytes(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # a name of its own, such as torch's bfloat16
        return 1


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows of demonstrations and rows that were played as one batch, with the features that both have."""
    if len(parts) == 1:
        return dict(parts[0])
    shown, played = parts
    if ACTION not in shown or ACTION not in played:
        raise DataError(f"demonstrations and what is played share no {ACTION}: {sorted(shown)} and {sorted(played)}")
    return {name: torch.cat([shown[name], played[name].to(shown[name].dtype)]) for name in shown if name in played}
