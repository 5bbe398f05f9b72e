"""Supervised fine-tuning: raise the probability of given text.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from etude.algorithms import losses
from etude.algorithms.aggregate import Aggregation, aggregate
from etude.algorithms.masked import precise, predicted
from etude.errors import ConfigError
from etude.types import Loss
from etude.types.batch import Batch


@dataclass(kw_only=True)
class SFT:
    """Cross-entropy over the tokens of the loss mask, each weighed by `weights` if the batch has them.

    The first token of a row has no part, in the sum as in the mean: nothing predicts it.
    """

    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    length: int | None = None
    """Constant length for length_normalised, which needs one."""

    def __post_init__(self) -> None:
        if self.aggregation == "length_normalised" and self.length is None:
            raise ConfigError("length_normalised divides by a constant that no cut of a batch changes: give a length")

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return -log p of the tokens."""
        text = Batch.of(batch).require("input_ids", "loss_mask")
        mask_BT = predicted(text["loss_mask"], text.get("attention_mask"))
        log_probs_BT = precise(policy.log_probs(text))
        weights_BT = text["weights"].to(log_probs_BT) if "weights" in text.values else (mask_BT != 0).to(log_probs_BT)
        loss_BT = losses.cross_entropy(log_probs_BT, torch.where(mask_BT != 0, weights_BT, 0.0))
        return aggregate(loss_BT, mask_BT, self.aggregation, length=self.length)
