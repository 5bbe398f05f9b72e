"""Which losses of services are losses of ours, and with what parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from etude.algorithms.grpo import CISPO
from etude.algorithms.policy_gradient import PolicyGradient
from etude.algorithms.sft import SFT


@dataclass(frozen=True)
class Named:
    """A loss that a service computes by itself.

    All of these are sums over tokens, in proportion to the advantages or weights that are sent: what ours weighs a
    token with goes into those. `dro` is not among them: its square counts on tokens of the prompt too.
    """

    loss_fn: str
    config: dict[str, float] = field(default_factory=dict)

    @property
    def by_advantage(self) -> bool:
        """Whether it needs advantages and the sampler's log-probabilities, rather than weights."""
        return self.loss_fn != "cross_entropy"


CROSS_ENTROPY = Named("cross_entropy")


def named_loss(trainer: Any) -> Named | None:
    """Return the service's name for what a trainer minimises; None where it has none, and ours is differentiated here.

    Args:
        trainer: A `Trainer`; one with a `compute_loss` of its own minimises what nobody else knows.
    """
    algorithm = trainer.algorithm
    if not trainer._asks_algorithm:
        return None
    if algorithm is None or (isinstance(algorithm, SFT) and type(algorithm).loss is SFT.loss):
        return CROSS_ENTROPY
    if not isinstance(algorithm, PolicyGradient) or type(algorithm).loss is not PolicyGradient.loss:
        return None
    if algorithm.kl_coef and algorithm.kl_in == "loss":
        return None
    if type(algorithm) is CISPO:
        bounds = {"clip_low_threshold": algorithm.ratio_low, "clip_high_threshold": algorithm.ratio_high}
        return Named("cispo", bounds)
    if type(algorithm).token_loss is not PolicyGradient.token_loss or algorithm.dual_clip is not None:
        return None
    if algorithm.objective == "importance_sampling":
        return Named("importance_sampling")
    bounds = {"clip_low_threshold": 1.0 - algorithm.clip_low, "clip_high_threshold": 1.0 + algorithm.clip_high}
    return Named("ppo", bounds)
