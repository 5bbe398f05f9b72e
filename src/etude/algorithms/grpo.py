"""Algorithms that compare the completions of one prompt by mean and deviation: GRPO and its kin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import getfullargspec
from typing import ClassVar

from torch import Tensor

from etude.algorithms import advantages, losses
from etude.algorithms.advantages import Single, Std
from etude.algorithms.aggregate import Aggregation
from etude.algorithms.masked import masked_mean
from etude.algorithms.policy_gradient import PolicyGradient
from etude.errors import ConfigError
from etude.types.batch import Batch


@dataclass(kw_only=True)
class GRPO(PolicyGradient):
    """Compare completions within their group: (reward - mean) / deviation, with the clipped loss of PPO."""

    aggregation: Aggregation = "sequence_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    std: Std = "unbiased"
    """Deviation to divide by: unbiased (n - 1), population (n), or none."""
    eps: float = 1e-6
    """Added to the deviation."""
    single: Single = "zero"
    """Advantage of a group of one: zero, or the raw reward."""
    by_run: bool = False
    """Average each run (run_id) of a group first, so that runs of many turns weigh no more than others."""

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return one advantage per completion."""
        runs = batch.require("run_id")["run_id"] if self.by_run else None
        groups, scores = self.groups(batch), self.scores(batch)
        found = advantages.grpo(scores, groups, run_ids=runs, std=self.std, eps=self.eps, single=self.single)
        return {"advantages": found}


@dataclass(kw_only=True)
class DrGRPO(GRPO):
    """GRPO done right: no division by the deviation, nor by the length of a completion."""

    aggregation: Aggregation = "length_normalised"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    std: Std = "none"
    """Deviation to divide by: unbiased (n - 1), population (n), or none."""


@dataclass(kw_only=True)
class _OwnLoss(GRPO):
    """GRPO with a loss by token of its own, and what that loss takes of the algorithm's fields."""

    own_loss: ClassVar[Callable[..., Tensor]]
    takes: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.takes = tuple(getfullargspec(cls.own_loss).kwonlyargs)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.objective != "clip" or self.dual_clip is not None:
            raise ConfigError(f"{name} has an objective of its own: leave objective and dual_clip out")
        if "clip_low" not in self.takes and (self.clip_low, self.clip_high) != (0.2, 0.2):
            raise ConfigError(f"{name} does not clip as PPO does: leave clip_low and clip_high out")

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the loss by token (B, T)."""
        old_BT = self.old_log_probs(log_probs_BT, batch)
        taken = {name: getattr(self, name) for name in self.takes}
        return type(self).own_loss(log_probs_BT, old_BT, batch["advantages"], batch["loss_mask"], **taken)

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 by token where the clip acts (B, T), or None without a clip."""
        return super().clipped(log_ratio_BT, batch) if "clip_low" in self.takes else None


@dataclass(kw_only=True)
class GSPO(_OwnLoss):
    """GRPO with the ratio of whole sequences in place of the ratio of tokens."""

    own_loss = staticmethod(losses.gspo)

    clip_low: float = 3e-4
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence ratio is clipped above at 1 + clip_high."""

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 on the tokens of sequences whose ratio is clipped."""
        sequence_B = masked_mean(log_ratio_BT, batch["loss_mask"], 1)
        return super().clipped(sequence_B[:, None].expand_as(log_ratio_BT), batch)


@dataclass(kw_only=True)
class GMPO(_OwnLoss):
    """GRPO with the geometric mean of a completion's ratios, each clipped by itself: outliers move it little."""

    own_loss = staticmethod(losses.gmpo)

    clip_low: float = 0.4
    """The logarithm of a token's ratio is clipped below at -clip_low."""
    clip_high: float = 0.4
    """The logarithm of a token's ratio is clipped above at clip_high."""

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 by token where the clip acts."""
        advantages_BT: Tensor = batch["advantages"]
        above_BT = (log_ratio_BT > self.clip_high) & (advantages_BT > 0)
        below_BT = (log_ratio_BT < -self.clip_low) & (advantages_BT < 0)
        return (above_BT | below_BT).to(log_ratio_BT.dtype)


@dataclass(kw_only=True)
class SAPO(_OwnLoss):
    """GRPO with a soft gate in place of a clip: (4 / tau) sigmoid(tau (r - 1)), tau by the sign of the advantage."""

    own_loss = staticmethod(losses.sapo)

    tau_pos: float = 1.0
    """How fast the gate closes where the advantage is positive."""
    tau_neg: float = 1.05
    """How fast it closes where it is negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ConfigError("tau_pos and tau_neg must be positive")


@dataclass(kw_only=True)
class CISPO(_OwnLoss):
    """GRPO that clips the importance weight instead of the update, so that every token keeps its gradient."""

    own_loss = staticmethod(losses.cispo)
    clips_around_old = False

    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    ratio_low: float = 0.0
    """Least importance weight."""
    ratio_high: float = 4.0
    """Greatest importance weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio_low <= self.ratio_high:
            raise ConfigError("ratio_low must not be negative, nor above ratio_high")

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 where the importance weight is clipped."""
        ratio_BT = losses.ratio(log_ratio_BT)
        return ((ratio_BT < self.ratio_low) | (ratio_BT > self.ratio_high)).to(ratio_BT.dtype)


@dataclass(kw_only=True)
class DRO(_OwnLoss):
    """Group advantages, with a square around the old policy in place of a clip: for data that is not fresh."""

    own_loss = staticmethod(losses.dro)
    clips_around_old = False

    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    beta: float = 0.05
    """Weight of the square."""
