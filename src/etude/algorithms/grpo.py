"""Algorithms that compare the completions of one prompt by mean and deviation: GRPO and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
class GSPO(GRPO):
    """GRPO with the ratio of whole sequences in place of the ratio of tokens."""

    clip_low: float = 3e-4
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: float = 4e-4
    """The sequence ratio is clipped above at 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _own_objective(self, clips=True)

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each sequence on its tokens."""
        old_BT = self.old_log_probs(log_probs_BT, batch)
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return losses.gspo(log_probs_BT, old_BT, batch["advantages"], batch["loss_mask"], **clips)

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 on the tokens of sequences whose ratio is clipped."""
        sequence_B = masked_mean(log_ratio_BT, batch["loss_mask"], 1)
        return super().clipped(sequence_B[:, None].expand_as(log_ratio_BT), batch)


@dataclass(kw_only=True)
class GMPO(GRPO):
    """GRPO with the geometric mean of a completion's ratios, each clipped by itself: outliers move it little."""

    clip_low: float = 0.4
    """The logarithm of a token's ratio is clipped below at -clip_low."""
    clip_high: float = 0.4
    """The logarithm of a token's ratio is clipped above at clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _own_objective(self, clips=True)

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each completion on its tokens."""
        old_BT = self.old_log_probs(log_probs_BT, batch)
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return losses.gmpo(log_probs_BT, old_BT, batch["advantages"], batch["loss_mask"], **clips)

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 by token where the clip acts."""
        advantages_BT: Tensor = batch["advantages"]
        above_BT = (log_ratio_BT > self.clip_high) & (advantages_BT > 0)
        below_BT = (log_ratio_BT < -self.clip_low) & (advantages_BT < 0)
        return (above_BT | below_BT).to(log_ratio_BT.dtype)


@dataclass(kw_only=True)
class SAPO(GRPO):
    """GRPO with a soft gate in place of a clip: (4 / tau) sigmoid(tau (r - 1)), tau by the sign of the advantage."""

    tau_pos: float = 1.0
    """How fast the gate closes where the advantage is positive."""
    tau_neg: float = 1.05
    """How fast it closes where it is negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _own_objective(self, clips=False)
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ConfigError("tau_pos and tau_neg must be positive")

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the gated objective, negated."""
        old_BT = self.old_log_probs(log_probs_BT, batch)
        taus = {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg}
        return losses.sapo(log_probs_BT, old_BT, batch["advantages"], batch["loss_mask"], **taus)

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return None: nothing is clipped."""
        return None


@dataclass(kw_only=True)
class CISPO(GRPO):
    """GRPO that clips the importance weight instead of the update, so that every token keeps its gradient."""

    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    ratio_low: float = 0.0
    """Least importance weight."""
    ratio_high: float = 4.0
    """Greatest importance weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _own_objective(self, clips=False)
        if not 0 <= self.ratio_low <= self.ratio_high:
            raise ConfigError("ratio_low must not be negative, nor above ratio_high")

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the weighed log-probabilities."""
        old_BT = self.old_log_probs(log_probs_BT, batch)
        bounds = {"ratio_low": self.ratio_low, "ratio_high": self.ratio_high}
        return losses.cispo(log_probs_BT, old_BT, batch["advantages"], batch["loss_mask"], **bounds)

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 where the importance weight is clipped."""
        ratio_BT = losses.ratio(log_ratio_BT)
        return ((ratio_BT < self.ratio_low) | (ratio_BT > self.ratio_high)).to(ratio_BT.dtype)


@dataclass(kw_only=True)
class DRO(GRPO):
    """Group advantages, with a square around the old policy in place of a clip: for data that is not fresh."""

    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    beta: float = 0.05
    """Weight of the square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _own_objective(self, clips=False)

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the regularised objective, negated."""
        old_BT = self.old_log_probs(log_probs_BT, batch)
        return losses.dro(log_probs_BT, old_BT, batch["advantages"], batch["loss_mask"], beta=self.beta)

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return None: nothing is clipped."""
        return None


def _own_objective(algorithm: GRPO, *, clips: bool) -> None:
    """Refuse what an algorithm with an objective of its own would ignore."""
    name = type(algorithm).__name__
    if algorithm.objective != "clip" or algorithm.dual_clip is not None:
        raise ConfigError(f"{name} has an objective of its own: leave objective and dual_clip out")
    if not clips and (algorithm.clip_low, algorithm.clip_high) != (0.2, 0.2):
        raise ConfigError(f"{name} does not clip as PPO does: leave clip_low and clip_high out")
