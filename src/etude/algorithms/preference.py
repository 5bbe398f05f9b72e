"""Learning from pairs, of which one is preferred: DPO and its variants, IPO, and SimPO and ORPO without a reference.

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

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.masked import masked_mean, masked_sum
from etude.algorithms.policy_gradient import PolicyGradient
from etude.errors import ConfigError
from etude.types import Loss
from etude.types.batch import Batch

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


class Pairwise:
    """What algorithms on pairs share: pairs are made of rollouts if need be, and both sides go through in one pass."""

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        """Return pairs with all that `loss` needs, made of rollouts if need be, `rows` at a time."""
        found = Batch.of(batch)
        return found.copy() if "chosen_input_ids" in found else preference_pairs(found)

    def prepare(self, policy: Any, batch: Any) -> Batch:
        """Return pairs with all that `loss` needs."""
        return self.experience(policy, batch)

    @staticmethod
    def both(pairs: Batch) -> Batch:
        """Return the chosen rows, then the rejected: a prompt that they share is computed once by policies that can."""
        return Batch.concatenate([_side(pairs, side) for side in _SIDES])

    @staticmethod
    def log_probs(policy: Any, pairs: Batch, *, mean: bool) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of both sides (P,), summed over their tokens or as means."""
        both = Pairwise.both(pairs)
        log_probs_B = (masked_mean if mean else masked_sum)(policy.log_probs(both), both["loss_mask"], 1)
        return log_probs_B[: len(pairs)], log_probs_B[len(pairs) :]

    @staticmethod
    def counted(pairs: Batch) -> Tensor:
        """Return which pairs count (P,): those with a token that counts on both sides."""
        counts_P = ~pairs.is_padding
        for side in _SIDES:
            counts_P = counts_P & (pairs[f"{side}_loss_mask"] != 0).any(1)
        return counts_P

    @staticmethod
    def total(loss_P: Tensor, counts_P: Tensor, metrics: Mapping[str, Tensor]) -> Loss:
        """Return losses by pair as a `Loss`; metrics by pair become means."""
        total = torch.where(counts_P, loss_P, 0.0).sum()
        means = {name: masked_mean(value.detach(), counts_P) for name, value in metrics.items()}
        return Loss(total, counts_P.sum().to(total.dtype), means)


@dataclass(kw_only=True)
class DPO(Pairwise):
    """Prefer what was chosen to what was rejected, relative to a reference policy: -log sigmoid(beta h)."""

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round; for loss_type sigmoid and robust."""
    average_log_probs: bool = False
    """Compare means over tokens rather than sums, so that length does not count."""
    loss_type: Literal["sigmoid", "robust", "hinge", "apo_zero", "apo_down"] = "sigmoid"
    """What becomes of h: sigmoid (DPO), robust (unbiased under wrong labels), hinge (SLiC), apo_zero (raise the chosen,
    lower the rejected) or apo_down (lower both)."""

    def __post_init__(self) -> None:
        if self.beta <= 0 or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError("beta must be positive and label_smoothing in [0, 0.5)")
        if self.loss_type not in ("sigmoid", "robust", "hinge", "apo_zero", "apo_down"):
            raise ConfigError(
                f"unknown loss_type {self.loss_type!r}; choose from sigmoid, robust, hinge, apo_zero, apo_down"
            )
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ConfigError(f"loss_type {self.loss_type} has no label_smoothing; choose sigmoid or robust")

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        """Return pairs with the log-probs of the reference, made of rollouts if need be."""
        pairs = super().experience(policy, batch)
        if "chosen_ref_log_probs" in pairs and "rejected_ref_log_probs" in pairs:
            return pairs
        parts = pairs.split(rows) if rows and len(pairs) else [pairs]
        with torch.no_grad(), policy.reference() as reference:
            sides = [self.log_probs(reference, part, mean=self.average_log_probs) for part in parts]
        for side, column in zip(_SIDES, zip(*sides, strict=True), strict=True):
            pairs.values[f"{side}_ref_log_probs"] = torch.cat(column)
        return pairs

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some pairs; a pair of which a side has no token that counts weighs nothing."""
        pairs = Batch.of(batch).require("chosen_ref_log_probs", "rejected_ref_log_probs")
        chosen_P, rejected_P = self.log_probs(policy, pairs, mean=self.average_log_probs)
        counts_P = self.counted(pairs)
        chosen_gain_P = torch.where(counts_P, chosen_P - pairs["chosen_ref_log_probs"], 0.0)
        rejected_gain_P = torch.where(counts_P, rejected_P - pairs["rejected_ref_log_probs"], 0.0)
        metrics = {
            "accuracy": (chosen_gain_P > rejected_gain_P).to(chosen_gain_P.dtype),
            "margin": self.beta * (chosen_gain_P - rejected_gain_P),
            "chosen_reward": self.beta * chosen_gain_P,
            "rejected_reward": self.beta * rejected_gain_P,
            "chosen_log_prob": chosen_P,
            "rejected_log_prob": rejected_P,
        }
        return self.total(self.gain_loss(chosen_gain_P, rejected_gain_P), counts_P, metrics)

    def gain_loss(self, chosen_gain_P: Tensor, rejected_gain_P: Tensor) -> Tensor:
        """Return the loss by pair, from how much likelier each side is than under the reference."""
        if self.loss_type == "apo_zero":
            return losses.apo_zero(chosen_gain_P, rejected_gain_P, beta=self.beta)
        if self.loss_type == "apo_down":
            return losses.apo_down(chosen_gain_P, rejected_gain_P, beta=self.beta)
        return self.pair_loss(chosen_gain_P - rejected_gain_P)

    def pair_loss(self, logits_P: Tensor) -> Tensor:
        """Return the loss by pair, from how much more the policy prefers the chosen than the reference does."""
        if self.loss_type == "robust":
            return losses.robust_dpo(logits_P, beta=self.beta, noise=self.label_smoothing)
        if self.loss_type == "hinge":
            return losses.hinge(logits_P, beta=self.beta)
        return losses.dpo(logits_P, beta=self.beta, label_smoothing=self.label_smoothing)


@dataclass(kw_only=True)
class IPO(DPO):
    """Prefer the chosen by a set margin and no more: (h - 1 / (2 beta))^2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing:
            raise ConfigError("IPO has no label_smoothing: its margin is bounded as it is; leave it out, or choose dpo")
        if self.loss_type != "sigmoid":
            raise ConfigError(f"IPO is a loss_type of its own; leave {self.loss_type!r} out, or choose dpo")

    def pair_loss(self, logits_P: Tensor) -> Tensor:
        """Return the loss by pair."""
        return losses.ipo(logits_P, beta=self.beta)


class ReferenceFree(Pairwise):
    """Compare mean log-probabilities of pairs, without a reference policy."""

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some pairs; a pair of which a side has no token that counts weighs nothing."""
        pairs = Batch.of(batch)
        chosen_P, rejected_P = self.log_probs(policy, pairs, mean=True)
        metrics = {
            "accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
            "chosen_log_prob": chosen_P,
            "rejected_log_prob": rejected_P,
            **self.pair_metrics(chosen_P, rejected_P),
        }
        return self.total(self.pair_loss(chosen_P, rejected_P), self.counted(pairs), metrics)

    def pair_loss(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss by pair, from mean log-probabilities."""
        raise NotImplementedError

    def pair_metrics(self, chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
        """Return what is worth watching beside accuracy and log-probabilities, by pair."""
        return {}


@dataclass(kw_only=True)
class SimPO(ReferenceFree):
    """Prefer the chosen by mean log-probability and a margin: -log sigmoid(beta (c - r) - gamma)."""

    beta: float = 2.0
    """Scale of the difference of mean log-probabilities."""
    gamma: float = 1.0
    """By how much the chosen is to lead, after scaling."""

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.gamma < 0:
            raise ConfigError("beta must be positive and gamma not negative")

    def pair_loss(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss by pair, from mean log-probabilities."""
        return losses.simpo(chosen_P, rejected_P, beta=self.beta, gamma=self.gamma)

    def pair_metrics(self, chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
        """Return by how much the chosen leads."""
        return {"margin": self.beta * (chosen_P - rejected_P)}


@dataclass(kw_only=True)
class ORPO(ReferenceFree):
    """Imitate the chosen, and raise its odds over the rejected: -c - beta log sigmoid(log odds ratio)."""

    beta: float = 0.1
    """Weight of the odds ratio beside the imitation of the chosen."""

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ConfigError("beta must not be negative")

    def pair_loss(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss by pair, from mean log-probabilities."""
        return losses.orpo(chosen_P, rejected_P, beta=self.beta)

    def pair_metrics(self, chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
        """Return the logarithm of the odds ratio."""
        return {"log_odds": losses.log_odds_ratio(chosen_P, rejected_P)}


def _side(pairs: Batch, side: str) -> Batch:
    pairs.require(f"{side}_input_ids", f"{side}_loss_mask")
    ids, mask = pairs[f"{side}_input_ids"], pairs[f"{side}_loss_mask"]
    attention = pairs.get(f"{side}_attention_mask")
    attention = torch.ones_like(ids) if attention is None else attention
    return Batch({"input_ids": ids, "attention_mask": attention, "loss_mask": mask})
