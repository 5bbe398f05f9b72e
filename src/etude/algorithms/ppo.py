"""Proximal policy optimisation with a value head.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.advantages import gae
from etude.algorithms.masked import masked_whiten, precise
from etude.algorithms.policy_gradient import PolicyGradient
from etude.types.batch import Batch


@dataclass(kw_only=True)
class PPO(PolicyGradient):
    """Learn a value of every state, and credit each token by what came after it (GAE)."""

    gamma: float = 1.0
    """Discount of later rewards."""
    lam: float = 0.95
    """How far rewards are trusted over values: 0 looks one step ahead, 1 to the end."""
    whiten: bool = True
    """Normalise the advantages over the whole experience, on all ranks."""
    value_coef: float = 0.5
    """Weight of the loss of the values."""
    value_clip: float | None = 0.2
    """Values move at most this far from the old ones before their gradient is cut; None never cuts."""

    @property
    def needs_values(self) -> bool:
        """Whether the policy must have a value head."""
        return True

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return an advantage and a return per token; a row that was cut off may bring its `bootstrap` value."""
        mask_BT, values_BT = batch["loss_mask"], precise(batch.require("values")["values"])
        last_B = torch.as_tensor(batch["bootstrap"]).to(values_BT) if "bootstrap" in batch else None
        rewards_BT = self.token_rewards(batch).to(values_BT.dtype)
        found_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=self.gamma, lam=self.lam, bootstrap_B=last_B)
        if self.whiten:
            found_BT = masked_whiten(found_BT, mask_BT, gather=self.gather)
        return {"advantages": found_BT, "returns": returns_BT}

    def value_loss(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """Return the weighed, clipped loss of the values by token."""
        old_BT = batch["values"] if "values" in batch.values else None
        returns_BT = batch.require("returns")["returns"]
        found = losses.value_loss(values_BT, returns_BT, batch["loss_mask"], old_values_BT=old_BT, clip=self.value_clip)
        return self.value_coef * found
