"""KTO: learning from single texts, each desirable or not.

Shape letters: B rows, T tokens. What a batch holds beside `input_ids`, `attention_mask` and `loss_mask`:

| field | shape |
|---|---|
| label | (B,): 1 for a desirable completion, 0 for an undesirable one |
| mismatched_input_ids, _attention_mask, _loss_mask | (B, T): the prompt, with the completion of another prompt |
| ref_sums, kl_baseline | (B,), optional: what `prepare` adds |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.masked import masked_mean, masked_sum
from etude.algorithms.moments import Gather, Moments, alone
from etude.errors import ConfigError
from etude.types import Loss
from etude.types.batch import Batch

if TYPE_CHECKING:
    from etude.trainer import Trainer


@dataclass(kw_only=True)
class KTO:
    """Raise desirable texts above a baseline and lower undesirable ones below it: 1 - sigmoid(+-beta (g - z)).

    g is log p - log p_ref of a text. z estimates the divergence of the policy from the reference: the mean of
    log p - log p_ref of completions that belong to other prompts, at least 0, without gradient.
    """

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable texts; balance both so that weight times number differs by a third at most."""
    undesirable_weight: float = 1.0
    """Weight of undesirable texts."""
    baseline: Literal["mismatched", "zero"] = "mismatched"
    """What g is compared with: z of the batch on all ranks, or 0, which costs no pass over mismatched texts."""

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.desirable_weight < 0 or self.undesirable_weight < 0:
            raise ConfigError("beta must be positive, desirable_weight and undesirable_weight not negative")
        if self.baseline not in ("mismatched", "zero"):
            raise ConfigError(f"unknown baseline {self.baseline!r}; choose from mismatched, zero")
        self.gather: Gather = alone
        """How numbers are exchanged with the other ranks."""

    def attach(self, trainer: Trainer) -> None:
        """Take the baseline over all ranks of a session from now on."""
        self.gather = trainer.session.gather

    def prepare(self, policy: Any, batch: Any) -> Batch:
        """Return a batch with the reference's log-probabilities and the baseline; ranks call together in training."""
        text = Batch.of(batch).copy().require("input_ids", "loss_mask", "label")
        with torch.no_grad():
            if "ref_sums" not in text.values:
                with policy.reference() as reference:
                    text.values["ref_sums"] = _sums(reference, text)
            if "kl_baseline" not in text.values:
                text.values["kl_baseline"] = torch.full_like(text["ref_sums"], self._baseline(policy, text))
        return text

    def _baseline(self, policy: Any, text: Batch) -> float:
        if self.baseline == "zero":
            return 0.0
        text.require("mismatched_input_ids", "mismatched_loss_mask")
        prefix = "mismatched_"
        other = Batch({name.removeprefix(prefix): value for name, value in text.values.items() if prefix in name})
        gain_B = _sums(policy, other)
        with policy.reference() as reference:
            gain_B = gain_B - _sums(reference, other)
        found = Moments.of(gain_B, ~text.is_padding & (other["loss_mask"] != 0).any(1))
        # In evaluation ranks do not keep step: the baseline is then the batch's own.
        return max(0.0, found.over(self.gather if getattr(policy, "training", True) else alone).mean)

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some rows; a row without a token that counts weighs nothing."""
        text = Batch.of(batch).require("label", "ref_sums", "kl_baseline")
        counts_B = ~text.is_padding & (text["loss_mask"] != 0).any(1)
        gain_B = torch.where(counts_B, _sums(policy, text) - text["ref_sums"], 0.0)
        baseline_B, good_B = text["kl_baseline"].to(gain_B), text["label"] != 0
        loss_B = losses.kto(gain_B, good_B, baseline_B, beta=self.beta)
        loss_B = torch.where(good_B, self.desirable_weight * loss_B, self.undesirable_weight * loss_B)
        total = torch.where(counts_B, loss_B, 0.0).sum()
        with torch.no_grad():
            ahead_B = torch.where(good_B, gain_B - baseline_B, baseline_B - gain_B)
            metrics = {
                "accuracy": (ahead_B > 0).to(total.dtype), "margin": self.beta * ahead_B, "kl_baseline": baseline_B,
            }  # fmt: skip
            means = {name: masked_mean(value, counts_B) for name, value in metrics.items()}
        return Loss(total, counts_B.sum().to(total.dtype), means)


def _sums(policy: Any, text: Batch) -> Tensor:
    return masked_sum(policy.log_probs(text), text["loss_mask"], 1)
