"""RLPD: soft actor-critic with many critics, many updates per environment step, and demonstrations in every batch.

Shape letters: B rows, A action, E critics, Z critics that are asked, U updates, M micro-batches.

A batch holds transitions: observations by name and, as `next.` names, those that followed; `action`, `reward` and
`discount`, which is 0 where the episode had ended by its own rules and gamma where it went on, or was only cut off.
They come from data that mixes demonstrations with what the policy did (`online:`), or from the buffer of the algorithm
itself, which `experience` fills with the episodes of `environment_rollouts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from etude.data.replay import ReplayBuffer
from etude.errors import ConfigError, DataError
from etude.policies.soft_actor_critic import NEXT, SoftActorCritic
from etude.rng import STREAM_SAMPLE, STREAM_STEP, fold
from etude.types import Loss, Updates
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from etude.trainer import Trainer

Episode = dict[str, Any]
"""Rows by name; see `ReplayBuffer.add`."""
NOISE, SUBSET, MOVES_ACTOR = "noise", "subset", "moves_actor"
"""What a batch brings to the loss where the same rows must meet the same numbers however they are split."""


def td_target(reward_B: Tensor, discount_B: Tensor, values_ZB: Tensor, bonus_B: Tensor | float = 0.0) -> Tensor:
    """Return what critics should have said (B,): the reward and, discounted, the least of the later values.

    Args:
        reward_B: What was earned.
        discount_B: What later rewards are worth; 0 where nothing comes later.
        values_ZB: What the critics that were asked expect later.
        bonus_B: What the later state is worth besides: its entropy.
    """
    return reward_B + discount_B * (values_ZB.amin(0) + bonus_B)


@dataclass(kw_only=True)
class RLPD:
    """Learn from transitions of any origin: critics from later critics, an actor from critics, with entropy's price."""

    updates_per_env_step: float = 1.0
    """Updates for each step that was simulated, where the algorithm keeps the buffer (environment_rollouts)."""
    gamma: float = 0.99
    """Discount of later rewards."""
    n_step: int = 1
    """Rewards that are summed before critics are asked."""
    tau: float = 0.005
    """Share of the way that the critics of the targets move to the trained ones at each update."""
    subset: int = 2
    """Critics, drawn anew for each update, of which the least makes the target; 1 trusts any of them."""
    actor_every: int = 1
    """Updates of the critics for each of the actor and the temperature."""
    target_entropy: float | None = None
    """Entropy that the temperature holds, in nats of normalised actions; None is half a nat below 0 per dimension."""
    backup_entropy: bool = True
    """Whether the entropy of later actions counts as earned."""
    reward_scale: float = 1.0
    """What rewards are multiplied by."""
    reward_shift: float = 0.0
    """What is added to each reward then. Where success ends an episode and rewards are positive, finishing costs what
    would still have come: a shift that makes all of them negative turns that round."""
    start_after: int = 1000
    """Steps in the buffer before the first update (environment_rollouts)."""
    max_frames: int = 1_000_000
    """Steps that the buffer keeps (environment_rollouts)."""

    wants_transitions = True
    takes_trajectories = True

    def __post_init__(self) -> None:
        _require(
            self.updates_per_env_step > 0, f"updates_per_env_step must be positive, got {self.updates_per_env_step}"
        )
        _require(0 < self.gamma <= 1, f"gamma lies above 0 and is at most 1, got {self.gamma}")
        _require(0 < self.tau <= 1, f"tau lies above 0 and is at most 1, got {self.tau}")
        counts = self.n_step, self.subset, self.actor_every
        _require(
            min(counts) >= 1, f"n_step, subset and actor_every must be at least 1, got {', '.join(map(str, counts))}"
        )
        _require(self.reward_scale > 0, f"reward_scale must be positive, got {self.reward_scale}")
        _require(
            self.n_step == 1 or not self.reward_shift,
            "reward_shift needs n_step: 1, for sums of rewards differ in length",
        )
        _require(self.start_after >= 0, f"start_after must not be negative, got {self.start_after}")
        self.buffer = ReplayBuffer(max_frames=self.max_frames)
        self.metrics: dict[str, tuple[float, float]] = {}
        self._owed = 0.0
        self._session: Any = None
        self._hook: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Let the critics of the targets follow at every update from now on."""
        policy: Any = trainer.policy
        session = trainer.session
        self.check(policy)
        self._session = session
        # After the optimizer that moves critics: once for each update, and not for one that was never made.
        wanted = set(policy.critics.parameters())
        movers = [one for one in session.optimizations.values() if wanted & set(one.params)]
        _require(bool(movers), "rlpd trains critics, but no optimizer has them; leave critics.* out of training.freeze")
        if self._hook is not None:
            self._hook.remove()
        self._hook = movers[-1].optimizer.register_step_post_hook(lambda *_: policy.follow(self.tau))

    def check(self, policy: Any) -> None:
        """Refuse a policy that this cannot train."""
        if not isinstance(policy, SoftActorCritic):
            raise ConfigError(f"rlpd trains a soft_actor_critic or a residual, not {type(policy).__name__}")
        _require(
            self.subset <= policy.critic_count,
            f"rlpd asks a subset of {self.subset} critics, and the policy has only {policy.critic_count}",
        )
        if any(isinstance(parameter, DTensor) for parameter in policy.parameters()):
            raise ConfigError(
                "rlpd asks for parts of a policy, which shards cannot answer; use engine.params.strategy: ddp"
            )

    # ---- a batch ---------------------------------------------------------------------------------------------------

    def loss(self, policy: SoftActorCritic, batch: Mapping[str, Any]) -> Loss:
        """Return the losses of critics, actor and temperature as one sum; none of them moves what is another's."""
        if missing := [name for name in ("reward", "discount") if name not in batch]:
            raise DataError(
                f"rlpd learns from transitions, and the batch has no {missing[0]}; use environment_rollouts, "
                "or data with an online: section"
            )
        seen, later = policy.see(batch), policy.see(batch, NEXT)
        actions_BA = policy.normal_actions(batch)
        noise = batch.get(NOISE)
        if noise is None:
            noise = torch.randn(
                actions_BA.shape[0], 2, actions_BA.shape[1], dtype=actions_BA.dtype, device=actions_BA.device
            )
        target_B = self.targets(policy, batch, later, noise[:, 0])
        values_EB = policy.critics(seen.features, actions_BA)
        critic = (values_EB - target_B).square().mean(0).sum()
        weight = actions_BA.shape[0]
        metrics: dict[str, Any] = {"critic_loss": critic.detach() / weight, "value": values_EB.detach().mean()}
        total = critic
        if self._moves_actor(batch):
            detached = seen._replace(features=seen.features.detach())
            drawn = policy.draw(detached, noise[:, 1])
            expected_B = policy.critics(detached.features, drawn.actions, moved=False).mean(0)
            temperature = policy.temperature
            log_probs = drawn.log_probs
            actor = (temperature.detach() * log_probs - expected_B).sum()
            surplus = -(log_probs.detach().sum() + weight * self._target_entropy(policy))
            total = total + actor + temperature * surplus
            metrics |= {"temperature": temperature.detach(), "entropy": -log_probs.detach().mean()}
        return Loss(total, weight, metrics)

    @torch.no_grad()
    def targets(self, policy: SoftActorCritic, batch: Mapping[str, Any], later: Any, noise_BA: Tensor) -> Tensor:
        """Return what the critics should have said of each row, (B,)."""
        drawn = policy.draw(later, noise_BA)
        subset = batch.get(SUBSET)
        if subset is None:
            subset = self._draw_subset(policy.critic_count)
        values_ZB = policy.target_critics(later.features, drawn.actions, subset_Z=subset)
        bonus: Tensor | float = -policy.temperature * drawn.log_probs if self.backup_entropy else 0.0
        reward_B = batch["reward"].to(values_ZB) * self.reward_scale + self.reward_shift
        return td_target(reward_B, batch["discount"].to(values_ZB), values_ZB, bonus)

    def _target_entropy(self, policy: SoftActorCritic) -> float:
        return -0.5 * policy.action_dim if self.target_entropy is None else self.target_entropy

    def _moves_actor(self, batch: Mapping[str, Any]) -> bool:
        if MOVES_ACTOR in batch:
            return bool(batch[MOVES_ACTOR])
        return self._session is None or (self._session.progress.step + 1) % self.actor_every == 0

    def _draw_subset(self, critics: int) -> Tensor:
        """Return the critics to ask, the same in every micro-batch of a step."""
        if self._session is None:
            return torch.randperm(critics)[: self.subset]
        place, step = self._session.place, self._session.progress.step
        return _permutations(fold(place.seed, STREAM_STEP, step, 1), 1, critics)[0, : self.subset]

    # ---- environment_rollouts --------------------------------------------------------------------------------------

    def experience(
        self, policy: SoftActorCritic, episodes: Sequence[Trajectory], *, rows: int | None = None
    ) -> Updates:
        """Keep the episodes of all ranks, and draw the batches of as many updates as their steps are worth."""
        session = self._session
        place, step = session.place, session.progress.step
        everyone = [_as_episode(one, policy) for one in episodes]
        if place.world > 1:  # all ranks keep all of it, so that any number of them draws the same rows
            numbers = [[int(one.group_id), int(one.run_id)] for one in episodes]
            own = [[number, _to_lists(one)] for number, one in zip(numbers, everyone, strict=True)]
            found = [pair for share in session.gather(own) for pair in share]
            everyone = [_from_lists(one) for _, one in sorted(found, key=lambda pair: pair[0])]
        frames = 0
        for episode in everyone:
            self.buffer.add(episode)
            frames += len(episode["reward"])
        ready = self.buffer.size() >= max(self.start_after, 1)
        self._owed += frames * self.updates_per_env_step if ready else 0.0
        count = int(self._owed)
        self._owed -= count
        self.metrics = {"buffer": (float(self.buffer.size()), 1.0), "updates": (float(count), 1.0)}
        return Updates(self._draw(policy, count, step) if count else [])

    def _draw(self, policy: SoftActorCritic, count: int, step: int) -> list[list[dict[str, Any]]]:
        """Return the micro-batches of this rank for each update: rows, noise and critics by (seed, step) alone."""
        place = self._session.place
        micros = place.accumulate * place.world
        total = count * micros * place.batch_size
        drawn = self.buffer.sample(
            total, key=fold(place.seed, STREAM_SAMPLE, step), transitions=True, n_step=self.n_step, gamma=self.gamma
        )
        values = {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in drawn.items()}
        generator = torch.Generator().manual_seed(fold(place.seed, STREAM_STEP, step, 2))
        values[NOISE] = torch.randn(total, 2, policy.action_dim, generator=generator)
        shaped = {name: value.view(count, micros, place.batch_size, *value.shape[1:]) for name, value in values.items()}
        subsets_UZ = _permutations(fold(place.seed, STREAM_STEP, step, 1), count, policy.critic_count)[:, : self.subset]
        own = range(place.rank, micros, place.world)
        return [
            [
                {
                    **{name: value[update, micro] for name, value in shaped.items()},
                    SUBSET: subsets_UZ[update], MOVES_ACTOR: (update + 1) % self.actor_every == 0,
                }
                for micro in own
            ]
            for update in range(count)
        ]  # fmt: skip

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer, and the part of an update that is still owed."""
        kept = {"buffer": self.buffer.state_dict()} if self.buffer.size() else {}  # with online: data, it is theirs
        return {**kept, "owed": self._owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.buffer = ReplayBuffer(max_frames=self.max_frames)
        if "buffer" in state:
            self.buffer.load_state_dict(state["buffer"])
        self._owed = float(state["owed"])


def _permutations(key: int, count: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(key)
    return torch.rand(count, size, generator=generator).argsort(1)


def _as_episode(trajectory: Trajectory, policy: SoftActorCritic) -> Episode:
    wanted = [name for name in policy.spec.features if name in trajectory]
    return {
        **{name: trajectory[name].numpy() for name in wanted},
        "reward": np.asarray(trajectory.token_level_scores, dtype=np.float32),
        "terminated": bool(trajectory.terminated),
        "success": bool(trajectory.success),
        "last": {name: value.numpy() for name, value in trajectory.last.items()},
    }


def _to_lists(episode: Episode) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return [str(value.dtype), value.tolist()] if isinstance(value, np.ndarray) else value

    return plain(episode)


def _from_lists(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _from_lists(inner) for name, inner in plain.items()}
    return np.array(plain[1], dtype=plain[0]) if isinstance(plain, list) else plain


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
