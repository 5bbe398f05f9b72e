"""Training a reward model: a score for whole texts, learned from pairs of which one is preferred.

Shape letters: T tokens, P pairs. The score is the policy's value at the last token that counts: that of the state
which has read all before it (with `end: true` in the data, the whole text).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.masked import masked_sum
from etude.algorithms.preference import Pairwise
from etude.errors import ConfigError
from etude.types import Loss
from etude.types.batch import Batch


@dataclass(kw_only=True)
class RewardModel(Pairwise):
    """Give the chosen a higher score than the rejected (Bradley-Terry): -log sigmoid(c - r - margin).

    The policy needs a value head. A pair may bring a `margin`, by which the chosen is to lead.
    """

    center: float = 0.0
    """Weight of (c + r)^2, which holds the scores about 0; 0.01 is usual."""

    def __post_init__(self) -> None:
        if self.center < 0:
            raise ConfigError("center must not be negative")

    @property
    def needs_values(self) -> bool:
        """Whether the policy must have a value head."""
        return True

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some pairs; a pair of which a side has no token that counts weighs nothing."""
        pairs = Batch.of(batch)
        scores_B = self.scores(policy, self.both(pairs))
        chosen_P, rejected_P = scores_B[: len(pairs)], scores_B[len(pairs) :]
        margin_P = pairs["margin"].to(scores_B) if "margin" in pairs.values else None
        loss_P = losses.bradley_terry(chosen_P, rejected_P, margin_P=margin_P, center=self.center)
        metrics = {
            "accuracy": (chosen_P > rejected_P).to(scores_B.dtype),
            "margin": chosen_P - rejected_P,
            "chosen_score": chosen_P,
            "rejected_score": rejected_P,
        }
        return self.total(loss_P, self.counted(pairs), metrics)

    @staticmethod
    def scores(policy: Any, batch: Any) -> Tensor:
        """Return the score of each row (B,); 0 of a row without a token that counts."""
        values_BT = getattr(policy.log_probs(batch, with_values=True), "values", None)
        if not isinstance(values_BT, Tensor):
            raise ConfigError("a reward model needs a policy with a value head; build it with value_head: true")
        counts_BT = batch["loss_mask"] != 0
        later_BT = counts_BT.flip(1).cumsum(1).flip(1)
        return masked_sum(values_BT, counts_BT & (later_BT == 1), 1)
