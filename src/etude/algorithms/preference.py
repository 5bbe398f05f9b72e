"""Learning from pairs, of which one is preferred: DPO and IPO.

Shape letters: B rows, T tokens, P pairs. One row of a batch is one pair, so that no split of a batch can part it:

| field | shape |
|---|---|
| chosen_input_ids, rejected_input_ids | (P, T), each with a T of its own |
| chosen_attention_mask, rejected_attention_mask | (P, T), optional |
| chosen_loss_mask, rejected_loss_mask | (P, T): 1 on the tokens that are compared, 0 on the prompt |
| chosen_ref_log_probs, rejected_ref_log_probs | (P,), optional: sums over those tokens, from the reference policy |

Rollouts (rows with a group_id and rewards) become such pairs by `preference_pairs`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.masked import masked_mean, masked_sum
from etude.algorithms.policy_gradient import PolicyGradient
from etude.batches import Batch
from etude.errors import ConfigError
from etude.types import Loss

_SIDES = ("chosen", "rejected")
_FIELDS = ("input_ids", "attention_mask", "loss_mask")


def preference_pairs(batch: Any) -> Batch:
    """Return the best and the worst completion of each group as a pair; groups in which all are equal give none."""
    rollouts = Batch.of(batch).require("input_ids", "loss_mask", "rewards")
    groups: dict[Hashable, list[int]] = {}
    real = (~rollouts.is_padding).tolist()
    ids = PolicyGradient.groups(rollouts)
    for i, group in enumerate(ids.tolist() if isinstance(ids, Tensor) else ids):
        if real[i]:
            groups.setdefault(group, []).append(i)
    rewards: list[float] = rollouts["rewards"].tolist()
    best = {group: max(rows, key=rewards.__getitem__) for group, rows in groups.items()}
    worst = {group: min(rows, key=rewards.__getitem__) for group, rows in groups.items()}
    kept = [group for group in groups if rewards[best[group]] > rewards[worst[group]]]
    pairs = Batch(metadata={"group_id": kept})
    for side, rows in zip(_SIDES, (best, worst), strict=True):
        index = [rows[group] for group in kept]
        for name in _FIELDS:
            if name in rollouts.values:
                pairs.values[f"{side}_{name}"] = rollouts.values[name][index]
        pairs.metadata[f"{side}_rewards"] = [rewards[i] for i in index]
    return pairs


@dataclass(kw_only=True)
class DPO:
    """Prefer what was chosen to what was rejected, relative to a reference policy: -log sigmoid(beta h)."""

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round."""
    average_log_probs: bool = False
    """Compare means over tokens rather than sums, so that length does not count."""

    def __post_init__(self) -> None:
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError("beta must be positive and label_smoothing in [0, 0.5)")

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        """Return pairs with the log-probs of the reference, made of rollouts if need be."""
        found = Batch.of(batch)
        pairs = found.copy() if "chosen_input_ids" in found else preference_pairs(found)
        if "chosen_ref_log_probs" in pairs and "rejected_ref_log_probs" in pairs:
            return pairs
        parts = pairs.split(rows) if rows and len(pairs) else [pairs]
        with torch.no_grad(), policy.reference() as reference:
            sides = [self._log_probs(reference, part) for part in parts]
        for side, column in zip(_SIDES, zip(*sides, strict=True), strict=True):
            pairs.values[f"{side}_ref_log_probs"] = torch.cat(column)
        return pairs

    def prepare(self, policy: Any, batch: Any) -> Batch:
        """Return pairs with the log-probs of the reference."""
        return self.experience(policy, batch)

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some pairs; a pair of which a side has no token that counts weighs nothing."""
        pairs = Batch.of(batch).require("chosen_ref_log_probs", "rejected_ref_log_probs")
        chosen_P, rejected_P = self._log_probs(policy, pairs)
        chosen_gain_P = chosen_P - pairs["chosen_ref_log_probs"]
        rejected_gain_P = rejected_P - pairs["rejected_ref_log_probs"]
        counts_P = _counted(pairs)
        loss_P = self.pair_loss(torch.where(counts_P, chosen_gain_P - rejected_gain_P, 0.0))
        total = torch.where(counts_P, loss_P, 0.0).sum()
        with torch.no_grad():
            metrics = {
                "accuracy": (chosen_gain_P > rejected_gain_P).to(total.dtype),
                "margin": self.beta * (chosen_gain_P - rejected_gain_P),
                "chosen_reward": self.beta * chosen_gain_P,
                "rejected_reward": self.beta * rejected_gain_P,
                "chosen_log_prob": chosen_P,
                "rejected_log_prob": rejected_P,
            }
            means = {name: masked_mean(value, counts_P) for name, value in metrics.items()}
        return Loss(total, counts_P.sum().to(total.dtype), means)

    def pair_loss(self, logits_P: Tensor) -> Tensor:
        """Return the loss by pair, from how much more the policy prefers the chosen than the reference does."""
        return losses.dpo(logits_P, beta=self.beta, label_smoothing=self.label_smoothing)

    def _log_probs(self, policy: Any, pairs: Batch) -> tuple[Tensor, Tensor]:
        # Both sides in one pass: a prompt that they share is computed once by policies that can.
        both = Batch.concatenate([_side(pairs, side) for side in _SIDES])
        reduce = masked_mean if self.average_log_probs else masked_sum
        log_probs_B = reduce(policy.log_probs(both), both["loss_mask"], 1)
        chosen_P, rejected_P = log_probs_B[: len(pairs)], log_probs_B[len(pairs) :]
        return chosen_P, rejected_P


@dataclass(kw_only=True)
class IPO(DPO):
    """Prefer the chosen by a set margin and no more: (h - 1 / (2 beta))^2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing:
            raise ConfigError("IPO has no label_smoothing: its margin is bounded as it is; leave it out, or choose dpo")

    def pair_loss(self, logits_P: Tensor) -> Tensor:
        """Return the loss by pair."""
        return losses.ipo(logits_P, beta=self.beta)


def _side(pairs: Batch, side: str) -> Batch:
    pairs.require(f"{side}_input_ids", f"{side}_loss_mask")
    ids, mask = pairs[f"{side}_input_ids"], pairs[f"{side}_loss_mask"]
    attention = pairs.get(f"{side}_attention_mask")
    attention = torch.ones_like(ids) if attention is None else attention
    return Batch({"input_ids": ids, "attention_mask": attention, "loss_mask": mask})


def _counted(pairs: Batch) -> Tensor:
    counts_P = ~pairs.is_padding
    for side in _SIDES:
        counts_P = counts_P & (pairs[f"{side}_loss_mask"] != 0).any(1)
    return counts_P
