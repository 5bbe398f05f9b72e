"""DPO, IPO and PPO on trees of turns, for `Trainer(config, sampler, algorithm)`.

Shape letters: B turns, T tokens, P pairs. What a turn is worth (its credit) is its own reward, or with
`credit="best"` or `"mean"` that plus gamma times the best or the mean credit of the turns that follow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.kl import kl
from etude.algorithms.masked import masked_mean, masked_whiten
from etude.errors import ConfigError
from etude.rollouts.graph import Graph, Node
from etude.rollouts.harness import Solver
from etude.rollouts.system import System, ValueFunctionSystem
from etude.types import is_number

Credit = Literal["immediate", "best", "mean"]


@dataclass(eq=False, repr=False)
class _TreeSolver(Solver):
    system: System
    """Whose auditor is trained."""
    credit: Credit = field(default="immediate", kw_only=True)
    """What a turn is worth, see the module."""
    gamma: float = field(default=0.9, kw_only=True)
    """Discount of the turns that follow."""

    def __post_init__(self) -> None:
        if not hasattr(self.system, "auditor_logprobs"):
            raise ConfigError(f"{type(self).__name__} needs a System first, got {type(self.system).__name__}")
        if self.credit not in ("immediate", "best", "mean"):
            raise ConfigError(f"unknown credit {self.credit!r}; choose from immediate, best, mean")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must be between 0 and 1, got {self.gamma}")

    def worth(self, node: Node) -> float:
        """Return the credit of a turn."""
        if self.credit == "immediate" or not node.children:
            return node.reward
        below = [self.worth(child) for child in node.children]
        return node.reward + self.gamma * (max(below) if self.credit == "best" else sum(below) / len(below))

    @staticmethod
    def collate_fn(steps: Sequence[Any]) -> Any:
        """Return the samples as lists by name."""
        return {name: [step[name] for step in steps] for name in steps[0]}


def _sampled(node: Node) -> tuple[Any, Any]:
    """Return context and probe of a turn, as the tokens that were sampled where they are known."""
    kept = node.extra.get("auditor")
    return (kept["prompt"], kept["tokens"]) if kept else (node.context, node.probe)


@dataclass(eq=False, repr=False)
class DPO(_TreeSolver):
    """Prefer the better of two probes of one context, relative to the baseline: -log sigmoid(beta h)."""

    samples = "pairs"
    no_samples = "all probes of each context earned the same, or said the same"

    beta: float = 0.1
    """How strongly the auditor is held to the baseline."""
    pairs: Literal["extreme", "all"] = field(default="extreme", kw_only=True)
    """The best and the worst of each group of siblings, or all pairs that differ in credit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.beta) or self.beta <= 0:
            raise ConfigError(f"beta must be a positive number, got {self.beta!r}")
        if self.pairs not in ("extreme", "all"):
            raise ConfigError(f"unknown pairs {self.pairs!r}; choose from extreme, all")

    def flatten(self, graph: Graph) -> Sequence[Any]:
        """Return pairs of siblings. Equal credit makes none, and neither do two that say the same."""
        groups = list(graph.groups())
        if groups and all(len(group) < 2 for group in groups):
            raise ConfigError(f"{type(self).__name__} compares siblings: set tree_width to 2 or more")
        return [pair for group in groups for pair in self._pairs(group)]

    def _pairs(self, group: Sequence[Node]) -> list[dict[str, Any]]:
        ranked = sorted(((self.worth(node), node) for node in group), key=lambda item: item[0])
        chosen = itertools.combinations(ranked, 2) if self.pairs == "all" else [(ranked[0], ranked[-1])]
        found = []
        for (low, worse), (high, better) in chosen:
            context, winner = _sampled(better)
            _, loser = _sampled(worse)
            if high > low and winner != loser:
                rewards = {"chosen_reward": high, "rejected_reward": low}
                found.append({"context": context, "chosen": winner, "rejected": loser, **rewards})
        return found

    def step(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the mean loss of pairs; one pass of the auditor with gradient, one of the baseline without."""
        contexts, probes, place = _distinct(batch["context"] * 2, batch["chosen"] + batch["rejected"])
        policy_P, policy_rejected_P = self.system.auditor_logprobs(contexts, probes).sum(1)[place].chunk(2)
        reference = self.system.baseline_logprobs(contexts, probes).sum(1).to(policy_P.device)
        ref_P, ref_rejected_P = reference[place].chunk(2)
        logits_P = losses.preference_logits(policy_P, policy_rejected_P, ref_P, ref_rejected_P)
        loss = self.pair_loss(logits_P).mean()
        with torch.no_grad():
            chosen_P, rejected_P = self.beta * (policy_P - ref_P), self.beta * (policy_rejected_P - ref_rejected_P)
            logs = {
                "reward/chosen": chosen_P.mean(),
                "reward/rejected": rejected_P.mean(),
                "reward/margin": (chosen_P - rejected_P).mean(),
                "reward/accuracies": (chosen_P > rejected_P).float().mean(),
                "policy/chosen_logprobs": policy_P.mean(),
                "policy/rejected_logprobs": policy_rejected_P.mean(),
                "sample/chosen_reward": _mean(batch["chosen_reward"]),
                "sample/rejected_reward": _mean(batch["rejected_reward"]),
            }
        return loss, logs

    def pair_loss(self, logits_P: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return losses.dpo(logits_P, beta=self.beta)


class IPO(DPO):
    """As DPO, but with a margin that is to be just so large: (h - 1 / (2 beta))^2."""

    def pair_loss(self, logits_P: Tensor) -> Tensor:
        """Return the loss of each pair."""
        return losses.ipo(logits_P, beta=self.beta)


@dataclass(eq=False, repr=False)
class PPO(_TreeSolver):
    """Reinforce probes by what they earned beyond expectation, with the ratio to how likely they were when sampled.

    The return of every token of a probe is the turn's credit; its advantage is that less the value before the token.
    """

    samples = "turns"

    system: ValueFunctionSystem
    """Whose auditor is trained; it must estimate values."""
    clip_range: float = 0.1
    """How far the ratio may leave 1 before its gradient is cut."""
    vf_loss_coef: float = 1.0
    """Weight of the value's squared error."""
    kl_coef: float = field(default=0.0, kw_only=True)
    """Weight of the divergence from the baseline (k2)."""
    epochs: int = field(default=1, kw_only=True)
    """How often each turn of an experience is learned from."""
    whiten: bool = field(default=True, kw_only=True)
    """Whether advantages of a batch are brought to mean 0 and variance 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(getattr(self.system, "value", None)) or getattr(self.system, "has_values", True) is False:
            raise ConfigError("PPO needs values: give the system value_head=True, or a ValueFunctionSystem of yours")
        if self.clip_range <= 0 or self.epochs < 1:
            raise ConfigError(
                f"clip_range must be positive and epochs at least 1, got {self.clip_range} and {self.epochs}"
            )

    def flatten(self, graph: Graph) -> Sequence[Any]:
        """Return every turn with the log-probabilities of its probe when it was sampled."""
        nodes = list(graph.nodes())
        samples = []
        for node, logprobs in zip(nodes, self._old_logprobs(nodes), strict=True):
            context, probe = _sampled(node)
            samples.append({"context": context, "probe": probe, "logprobs": logprobs, "reward": self.worth(node)})
        return samples * self.epochs

    def _old_logprobs(self, nodes: Sequence[Node]) -> list[list[float]]:
        """Return the log-probabilities kept from sampling; without them, those under the auditor as it is now.

        Trees are flattened before anything is learned from them, so the auditor is still the one that sampled.
        """
        kept = [node.extra.get("auditor", {}).get("logprobs") for node in nodes]
        if nodes and any(logprobs is None for logprobs in kept):
            with torch.no_grad():
                found_BT = self.system.auditor_logprobs(*map(list, zip(*map(_sampled, nodes), strict=True)))
            kept = [_without_padding(row.tolist()) for row in found_BT]
        return kept

    def step(self, batch: Any) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the mean loss over the tokens of the probes."""
        log_probs_BT, values_BT = self._now(batch["context"], batch["probe"])
        old_BT, mask_BT = _padded(batch["logprobs"], log_probs_BT)
        returns_BT = torch.tensor(batch["reward"]).to(log_probs_BT).reshape(-1, 1).expand_as(log_probs_BT)
        advantages_BT = returns_BT - values_BT.detach()
        if self.whiten:
            advantages_BT = masked_whiten(advantages_BT, mask_BT)
        clip = self.clip_range
        surrogate_BT = losses.ppo_clip(log_probs_BT, old_BT, advantages_BT, mask_BT, clip_low=clip, clip_high=clip)
        policy_loss = masked_mean(surrogate_BT, mask_BT)
        value_loss = masked_mean(losses.value_loss(values_BT, returns_BT, mask_BT), mask_BT)
        loss = policy_loss + self.vf_loss_coef * value_loss
        with torch.no_grad():
            log_ratio_BT = losses.log_ratio(log_probs_BT, old_BT, mask_BT)
            clipped_BT = losses.clipped_fraction(log_ratio_BT, advantages_BT, clip_low=clip, clip_high=clip)
            logs = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "reward": _mean(batch["reward"]),
                "value": masked_mean(values_BT, mask_BT),
                "ratio": masked_mean(log_ratio_BT.exp(), mask_BT),
                "clipped": masked_mean(clipped_BT, mask_BT),
            }
        if self.kl_coef:
            ref_BT = self.system.baseline_logprobs(batch["context"], batch["probe"]).to(log_probs_BT)
            if ref_BT.shape != log_probs_BT.shape:
                raise ConfigError("kl_coef needs a baseline with the auditor's tokenizer")
            divergence = masked_mean(kl(log_probs_BT, ref_BT, "k2", mask_BT=mask_BT), mask_BT)
            loss = loss + self.kl_coef * divergence
            logs["kl"] = divergence.detach()
        return loss, logs

    def _now(self, contexts: Sequence[Any], probes: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and values, in one pass where the system can."""
        together = getattr(self.system, "logprobs_and_values", None)
        if together is not None:
            found: tuple[Tensor, Tensor] = together(contexts, probes)
            return found
        return self.system.auditor_logprobs(contexts, probes), self.system.value(contexts, probes)


def _distinct(contexts: Sequence[Any], probes: Sequence[Any]) -> tuple[list[Any], list[Any], list[int]]:
    """Return each turn once, and where in that each of the given ones is: a probe may be in several pairs."""
    rows: dict[Any, int] = {}
    kept: list[tuple[Any, Any]] = []
    place = []
    for context, probe in zip(contexts, probes, strict=True):
        key = _name(context), _name(probe)
        if key not in rows:
            rows[key] = len(kept)
            kept.append((context, probe))
        place.append(rows[key])
    return [context for context, _ in kept], [probe for _, probe in kept], place


def _name(value: Any) -> Any:
    """Return what tells a text or its tokens from others; of other things each is its own."""
    if isinstance(value, str):
        return value
    return tuple(value) if isinstance(value, list | tuple) else id(value)


def _without_padding(row: list[float]) -> list[float]:
    """Return the log-probabilities of a row without the zeros that systems pad with."""
    length = max((at + 1 for at, value in enumerate(row) if value != 0), default=0)
    return row[:length]


def _padded(rows: Sequence[Sequence[float]], like_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return old log-probabilities as (B, T), and a mask of the tokens there are."""
    if max(map(len, rows)) > like_BT.shape[1]:
        raise ValueError("a probe was sampled with more tokens than the auditor now finds in it")
    old_BT = torch.zeros_like(like_BT, requires_grad=False)
    mask_BT = torch.zeros_like(old_BT, dtype=torch.bool)
    for at, row in enumerate(rows):
        old_BT[at, : len(row)] = torch.tensor(row).to(old_BT)
        mask_BT[at, : len(row)] = True
    return old_BT, mask_BT


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
