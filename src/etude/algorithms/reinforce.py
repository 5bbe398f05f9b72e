"""REINFORCE with one baseline or another: the others of the group, the whole batch, length-weighed, greedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.algorithms import advantages
from etude.algorithms.advantages import Single
from etude.algorithms.policy_gradient import PolicyGradient
from etude.errors import ConfigError
from etude.types.batch import Batch


@dataclass(kw_only=True)
class RLOO(PolicyGradient):
    """Compare each completion with the mean of the others of its group (leave one out)."""

    single: Single = "zero"
    """Advantage of a group of one: zero, or the raw reward."""

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return one advantage per completion."""
        return {"advantages": advantages.rloo(self.scores(batch), self.groups(batch), single=self.single)}


@dataclass(kw_only=True)
class ReinforcePlusPlus(PolicyGradient):
    """Normalise the returns of all tokens over the whole batch, on all ranks; needs no groups."""

    gamma: float = 1.0
    """Discount of later rewards."""
    group_baseline: bool = False
    """Subtract the mean of the group before normalising."""

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return an advantage and a return per token."""
        rewards_BT, mask_BT = self.token_rewards(batch), batch["loss_mask"]
        if self.group_baseline:
            scores_B = self.scores(batch)
            baseline_B = scores_B - advantages.dr_grpo(scores_B, self.groups(batch), single="raw")
            rewards_BT = rewards_BT - advantages.token_rewards(baseline_B, mask_BT)
        found_BT, returns_BT = advantages.reinforce_plus_plus(rewards_BT, mask_BT, gamma=self.gamma, gather=self.gather)
        return {"advantages": found_BT, "returns": returns_BT}


@dataclass(kw_only=True)
class OPO(PolicyGradient):
    """Compare with the baseline of least variance: the mean of the group weighed by length."""

    single: Single = "zero"
    """Advantage of a group of one: zero, or the raw reward."""

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return one advantage per completion."""
        lengths_B = (batch["loss_mask"] != 0).sum(1)
        found = advantages.opo(self.scores(batch), lengths_B, self.groups(batch), single=self.single)
        return {"advantages": found}


@dataclass(kw_only=True)
class ReMax(PolicyGradient):
    """Compare with the reward of the greedy completion, which rollouts give as `greedy_rewards`, one per row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong_length is not None:
            raise ConfigError("ReMax does not know the length of greedy completions: leave overlong_length out")

    @property
    def needs_greedy(self) -> bool:
        """Whether every prompt needs a greedy completion beside the sampled ones."""
        return True

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return one advantage per completion."""
        scores_B = self.scores(batch)
        greedy_B = torch.as_tensor(batch.require("greedy_rewards")["greedy_rewards"]).to(scores_B)
        return {"advantages": advantages.remax(scores_B, greedy_B)}
