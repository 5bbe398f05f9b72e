"""Divergence from a reference policy: estimators from sampled tokens, and coefficients that hold it in check.

Shape letters: B rows, T tokens. With d = log p(token) - log p_ref(token), tokens sampled from p:

| kind | formula | value | gradient, as a loss |
|---|---|---|---|
| k1 | d | unbiased, may be negative | averages to 0: restrains nothing |
| abs | abs(d) | biased | sign(d) times the gradient of log p |
| k2 | d^2 / 2 | biased, small near 0 | that of KL(p, p_ref), unbiased |
| k3 | exp(-d) + d - 1 | unbiased, never negative | that of KL(p_ref, p): the other direction |

As a penalty (subtracted from rewards, no gradient) k1 and k3 are right; as a loss k2 has the gradient one means, and
k3, which is what GRPO was published with, agrees with it only to first order near d = 0.

Where -d is above 20, the exponential of k3 goes on as its tangent: finite, and still pulling towards the reference.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor

from etude.algorithms.losses import MAX_LOG_RATIO
from etude.algorithms.masked import precise
from etude.errors import ConfigError

Kind = Literal["k1", "abs", "k2", "k3"]
_NAMES: Final[dict[str, Kind]] = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}


def kl(log_probs_BT: Tensor, ref_log_probs_BT: Tensor, kind: Kind = "k3", *, mask_BT: Tensor | None = None) -> Tensor:
    """Return an estimate of KL(p, p_ref) by token; 0 where the mask is 0."""
    delta_BT = precise(log_probs_BT) - precise(ref_log_probs_BT)
    if mask_BT is not None:
        delta_BT = torch.where(mask_BT != 0, delta_BT, 0.0)
    if kind == "k1":
        return delta_BT
    if kind == "abs":
        return delta_BT.abs()
    if kind == "k2":
        return 0.5 * delta_BT**2
    if kind == "k3":
        near_BT = (-delta_BT).clamp(max=MAX_LOG_RATIO)
        beyond_BT = (-delta_BT - MAX_LOG_RATIO).clamp(min=0.0)
        return torch.expm1(near_BT) + math.exp(MAX_LOG_RATIO) * beyond_BT + delta_BT
    raise ConfigError(f"unknown kind of KL {kind!r}; choose from k1, abs, k2, k3")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty_type: str = "kl") -> Tensor:
    """Return the estimate by its older names: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kind = _NAMES.get(kl_penalty_type)
    if kind is None:
        raise ConfigError(f"unknown kind of KL {kl_penalty_type!r}; choose from {', '.join(_NAMES)}")
    return kl(logprob, ref_logprob, kind)


class FixedKLController:
    """Keep the coefficient of the KL term as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Change nothing."""


class AdaptiveKLController:
    """Move the coefficient so that the divergence approaches a target.

    value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(f"an adaptive KL needs a positive target and horizon, got {target_kl} and {horizon}")
        self.value = float(init_kl_coef)
        self.target, self.horizon = float(target_kl), float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Take note of the divergence measured over `n_steps` samples."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon
