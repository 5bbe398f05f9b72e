"""Rollouts in a simulator as Data: each step plays episodes with the policy as it is, and trains on what they earned.

An episode becomes a `Trajectory` whose steps stand where a text has its tokens: the features by name (T, ...), the
action that was drawn, and by step its log-probability, value and reward. Everything is a function of (seed, episode,
step), so that a resumed run, or one on more ranks, plays the same episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from etude.errors import ConfigError, NonFiniteError, RolloutError
from etude.rng import fold_array
from etude.rollouts.diaries import Diaries, Diary, timed_pool
from etude.rollouts.measures import measure_rewards, timed
from etude.signatures.nested import OptionsOf
from etude.simulation.actors import PolicyActor, Seat, is_finite
from etude.simulation.environments.base import Array
from etude.simulation.episodes import EpisodeRunner, Job
from etude.simulation.results import EpisodeRow
from etude.types import DataSpec, Rollouts
from etude.types.protocols import Place
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from etude.trainer import Trainer

SPLIT = "train"


class Explorer(PolicyActor):
    """A policy that tries things out: draws its actions, and keeps how likely they were.

    All slots are asked for at once, free ones included: in a batch of one size, what a row comes to does not depend on
    the other rows, and so not on how episodes are shared by ranks.
    """

    def __init__(self, policy: nn.Module, slots: int) -> None:
        """Take a policy with `sample(observation, uniforms)` and `draws`, such as `ActorCritic`."""
        if not callable(getattr(policy, "sample", None)):
            raise ConfigError(
                f"rollouts in an environment need a policy that draws its actions, such as actor_critic; "
                f"{type(policy).__name__} has no sample(observation, uniforms)"
            )
        super().__init__(policy)
        self.slots = self.most_slots = slots
        self.log_probs: dict[int, float] = {}
        """How likely the last action of each slot was."""

    def act(self, seats: Sequence[Seat]) -> list[Array]:
        """Draw the action of each running episode, from random numbers that its key decides."""
        rows = [self.tensors(seat) for seat in seats]
        rows += rows[:1] * (self.slots - len(rows))
        batch = {name: torch.stack([row[name] for row in rows]).to(self.device) for name in rows[0]}
        keys = [seat.key for seat in seats] + [0] * (self.slots - len(seats))
        found: Any = self.policy.sample(batch, self._uniforms(keys))  # type: ignore[operator]
        self.log_probs = dict(zip((seat.slot for seat in seats), found.log_probs.tolist(), strict=False))
        actions: Array = found.actions[: len(seats)].cpu().numpy()
        if not is_finite(actions):
            raise NonFiniteError(f"{type(self.policy).__name__} drew an action that is not finite: {actions[0]}")
        return list(actions)

    def _uniforms(self, keys: Sequence[int]) -> Tensor:
        draws = int(self.policy.draws)  # type: ignore[arg-type]
        mixed = fold_array(np.array(keys, dtype=np.uint64)[:, None], np.arange(draws)[None])
        return torch.from_numpy(((mixed >> np.uint64(12)) + 0.5) * 2.0**-52).to(self.device)  # never 0, never 1

    def values(self, seen: Mapping[str, Tensor]) -> list[float] | None:
        """Return what the policy expects of each observation (T, ...); None if it expects nothing."""
        value = getattr(self.policy, "value", None)
        found = None if value is None else value({name: rows.to(self.device) for name, rows in seen.items()})
        return None if found is None else found.tolist()


class EnvironmentRollouts:
    """Episodes in a simulator, drawn by the policy: where the batches of a controller come from.

    Args:
        env: An environment, such as gym:CartPole-v1 or metaworld/reach.
        episodes_per_step: Episodes of one step, over all ranks.
        group_size: Episodes that begin alike, for algorithms that compare them (grpo, rloo).
        slots: Episodes side by side in each process.
        options: Parameters of the environment.
        step_timeout_s: Seconds that one step of the simulator may take; None for no limit.
        on_error: What to do when the simulator raises, gives no finite numbers or takes too long: drop that episode, or
            stop.
    """

    def __init__(
        self,
        env: str,
        episodes_per_step: int = 16,
        group_size: int = 1,
        slots: int = 16,
        options: Annotated[dict[str, Any], OptionsOf("env")] | None = None,
        step_timeout_s: float | None = 10.0,
        on_error: Literal["drop", "stop"] = "drop",
    ) -> None:
        if episodes_per_step < 1 or group_size < 1 or slots < 1 or episodes_per_step % group_size:
            raise ConfigError(
                "episodes_per_step, group_size and slots must be at least 1, and episodes_per_step a multiple of "
                f"group_size; got {episodes_per_step}, {group_size} and {slots}"
            )
        if on_error not in ("drop", "stop"):
            raise ConfigError(f"on_error must be drop or stop, got {on_error!r}")
        self.env, self.episodes_per_step, self.group_size = env, episodes_per_step, group_size
        self.slots, self.on_error = slots, on_error
        self._pool = timed_pool(env, options, step_timeout_s)
        self._spec: DataSpec | None = None
        self.metrics: dict[str, tuple[float, float]] = {}
        self.timings: dict[str, float] = {}
        self.trajectories: list[Trajectory] = []
        """The episodes of the last step that did not fail."""
        self._knows_success = False
        self.failures: dict[int, str] = {}
        """Why the others failed, by episode."""
        self.env_steps = 0
        """Steps simulated by this rank."""

    # ---- as Data -----------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> DataSpec:
        """What the environment shows and takes."""
        if self._spec is None:
            env = self._pool.borrow(self.env)
            self._spec = env.spec
            self._pool.give(self.env, env)
        return self._spec

    def attach(self, trainer: Trainer) -> None:
        """Learn who acts."""
        algorithm: Any = trainer.algorithm
        if not hasattr(algorithm, "experience"):
            raise ConfigError(
                "rollouts in an environment need an algorithm that learns from rewards, such as ppo; "
                f"got {'none' if algorithm is None else type(algorithm).__name__}"
            )
        if getattr(algorithm, "kl_coef", 0.0) and not hasattr(trainer.policy, "reference"):
            raise ConfigError(f"{type(trainer.policy).__name__} has no reference to be held to; leave out kl_coef")
        self._trainer, self._gather = trainer, trainer.session.gather
        self._explorer = Explorer(trainer.policy, self.slots)
        self._keeps_last = bool(getattr(algorithm, "wants_transitions", False))
        (self._action_name,) = self.spec.with_role("action")

    def open(self, place: Place) -> None:
        """Get ready to play one rank's share."""
        if self.episodes_per_step // self.group_size < place.world:
            raise ConfigError(
                f"{self.episodes_per_step} episodes per step in groups of {self.group_size} cannot be shared by "
                f"{place.world} ranks"
            )
        self.place = place

    def take(self, step: int) -> Rollouts:
        """Play the episodes of one step."""
        with timed(self.timings, "simulate"):
            self._play(self._episodes(step))
        self._measure()
        good = self.trajectories
        if not sum(self._gather(len(good))):
            reason = next(iter(self.failures.values()), None)
            raise RolloutError(f"all {len(self.failures)} episodes of step {step} failed; the first: {reason}")
        return Rollouts(good or [self._nothing()], are_padding=not good)

    def ids(self, step: int) -> Sequence[Any]:
        """Name the episodes of a step."""
        return [[f"{self.env} episode {episode}" for episode in self._episodes(step)]]

    def epochs(self, step: int) -> float:
        """Episodes never repeat: there are no epochs."""
        return 0.0

    def close(self) -> None:
        """Close the simulators."""
        self._pool.close()

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were simulated, by all ranks."""
        return {"env_steps": sum(self._gather(self.env_steps))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting; the first rank counts for those before it."""
        self.env_steps = int(state["env_steps"]) if self.place.rank == 0 else 0

    # ---- playing -----------------------------------------------------------------------------------------------------

    def _episodes(self, step: int) -> list[int]:
        groups, size = self.episodes_per_step // self.group_size, self.group_size
        own = range(step * groups + self.place.rank, (step + 1) * groups, self.place.world)
        return [group * size + index for group in own for index in range(size)]

    def _play(self, episodes: Sequence[int]) -> None:
        explorer, pulse = self._explorer, self._trainer.session.pulse
        diaries = Diaries(explorer.tensors, lambda seat: explorer.log_probs[seat.slot], self.on_error)
        runner = EpisodeRunner(
            explorer, self._pool, split=SPLIT, seed=self.place.seed, slots=self.slots, witness=diaries,
            heartbeat=lambda: pulse.enter("data"),
        )  # fmt: skip
        jobs = [Job(self.env, episode, start=episode // self.group_size) for episode in episodes]
        rows = {row.episode: row for row in runner.run(jobs)}
        self._knows_success = any(row.success is not None for row in rows.values())
        self.env_steps += runner.stopwatch.env_steps
        self.failures = diaries.failures
        with explorer.session():
            self.trajectories = [self._trajectory(rows[episode], diaries.diaries[episode]) for episode in sorted(rows)]

    def _trajectory(self, row: EpisodeRow, diary: Diary) -> Trajectory:
        seen = {name: torch.stack([one[name] for one in diary.seen]) for name in diary.seen[0]}
        fields: dict[str, Any] = {name: rows[:-1] for name, rows in seen.items()}
        fields[self._action_name] = torch.from_numpy(np.stack(diary.actions))
        fields |= {
            "logprobs": diary.notes, "token_level_scores": diary.rewards, "terminated": diary.terminated,
            "truncated": not diary.terminated, "success": bool(row.success), "task": row.task, "seed": row.seed,
            "group_id": row.episode // self.group_size, "run_id": row.episode % self.group_size,
        }  # fmt: skip
        if self._keeps_last:  # what the last action led to, where it is bootstrapped from
            fields["last"] = {name: rows[-1] for name, rows in seen.items()}
        values = self._explorer.values(seen)
        if values is not None:
            fields["values"] = values[:-1]
            fields["bootstrap"] = 0.0 if diary.terminated else values[-1]
        return Trajectory(None, [1] * len(diary.rewards), math.fsum(diary.rewards), extra_fields=fields)

    def _nothing(self) -> Trajectory:
        """Return an episode of one step that never was, for a rank all of whose episodes failed."""
        features = self.spec.features
        shown = {name: np.zeros(one.shape, one.dtype) for name, one in features.items() if one.role != "action"}
        env = self._pool.borrow(self.env)
        seen = self._explorer.tensors(Seat(0, env, shown, 0))
        self._pool.give(self.env, env)
        action = features[self._action_name]
        diary = Diary([seen, seen], [np.zeros(action.shape, action.dtype)], [0.0], [0.0])
        with self._explorer.session():
            return self._trajectory(EpisodeRow(self.env, env.task, 0, 0, False, 1, 0.0), diary)

    def _measure(self) -> None:
        good, total = self.trajectories, len(self.trajectories) + len(self.failures)
        count = float(len(good))
        self.metrics = {"rollout/failed": (len(self.failures) / max(1, total), float(total))}
        self.metrics |= measure_rewards((one.reward for one in good), self._gather)
        if good:
            self.metrics |= {
                "rollout/steps": (float(np.mean([len(one.loss_mask) for one in good])), count),
                "rollout/truncated": (float(np.mean([one.truncated for one in good])), count),
            }
            if self._knows_success:
                self.metrics["rollout/success"] = (float(np.mean([one.success for one in good])), count)
