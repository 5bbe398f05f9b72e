"""Losses for trainers made from (models, optimizers, loss, device), by name: `loss: {type: l2_loss, params: {...}}`.

Shape letters: B batch, E experts, D all that describes one sample.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from etude.errors import ConfigError, MissingExtraError
from etude.extras import import_extra

Reduction = Literal["mean", "sum", "none"]
Backend = Literal["auto", "tensorized", "online", "multiscale"]
_BACKENDS = ("auto", "tensorized", "online", "multiscale")


class L2Loss:
    """Squared errors of a prediction.

    Args:
        reduction: Their mean, their sum, or each of them. The mean does not grow with the batch, nor with the ranks.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        if reduction not in ("mean", "sum", "none"):
            raise ConfigError(f"loss 'l2_loss': reduction must be mean, sum or none, got {reduction!r}")
        self.reduction = reduction

    def build(self) -> nn.Module:
        """Return the module of (prediction, target)."""
        return nn.MSELoss(reduction=self.reduction)


class SinkhornKnopp:
    """Optimal transport between predicted and wanted pairs of action and state, over the batch as two clouds of points.

    To move a pair costs `(|a - a'|^2 + lam_state |s - s'|^2)^(p/2)`. Computed in float32 also under autocast. Each rank
    compares its own batch.

    Args:
        p: 1 for distances, 2 for squared distances.
        lam_state: Weight of the state beside the action.
        blur: How far apart points may be and still count as one, in the units of the data; the regularisation is
            `blur^p`.
        debias: Whether a cloud is at distance 0 from itself, which regularisation alone does not give.
        backend: tensorized (auto means that), or online or multiscale for large batches on a GPU, which need pykeops.
        scaling: Ratio of successive scales between 0 and 1; closer to 1 is more exact and slower.
    """

    def __init__(
        self,
        p: int = 1,
        lam_state: float = 0.2,
        blur: float = 0.004,
        debias: bool = True,
        backend: Backend = "tensorized",
        scaling: float = 0.95,
    ) -> None:
        wrong = {
            f"p must be 1 or 2, got {p}": p not in (1, 2),
            f"lam_state must not be negative, got {lam_state}": not 0 <= lam_state < math.inf,
            f"blur must be positive, got {blur}": not 0 < blur < math.inf,
            f"scaling must lie between 0 and 1, got {scaling}": not 0 < scaling < 1,
            f"backend must be auto, tensorized, online or multiscale, got {backend!r}": backend not in _BACKENDS,
        }
        if found := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise ConfigError(f"loss 'sinkhorn_knopp': {found[0]}")
        self.p, self.lam_state, self.blur, self.debias = p, lam_state, blur, debias
        self.backend, self.scaling = backend, scaling

    def build(self) -> nn.Module:
        """Return the module of (pred_action, target_action, state_pred, state_target)."""
        return SinkhornLoss(self.p, self.lam_state, self.blur, self.debias, self.backend, self.scaling)


class SinkhornLoss(nn.Module):
    """What `SinkhornKnopp` builds."""

    def __init__(self, p: int, lam_state: float, blur: float, debias: bool, backend: str, scaling: float) -> None:
        super().__init__()
        self.p, self.lam_state = p, lam_state
        samples_loss = import_extra("geomloss", "components").SamplesLoss
        if backend in ("online", "multiscale"):
            try:
                import_module("pykeops")
            except ImportError as error:
                raise MissingExtraError(
                    f"loss 'sinkhorn_knopp': backend {backend!r} needs pykeops ({error}); run: pip install pykeops, "
                    "or use backend: tensorized"
                ) from error
            cost: Any = "Norm2(X-Y)" if p == 1 else "SqDist(X,Y)"
        else:
            backend, cost = "tensorized", self._cost
        self.transport = samples_loss(
            "sinkhorn", p=p, blur=blur, debias=debias, cost=cost, backend=backend, scaling=scaling
        )

    def forward(
        self,
        pred_action: Tensor,
        target_action: Tensor,
        state_pred: Tensor | None = None,
        state_target: Tensor | None = None,
    ) -> Tensor:
        """Return what it costs to move the predicted pairs onto the wanted ones, as one number."""
        if (state_pred is None) != (state_target is None):
            raise ValueError("sinkhorn_knopp compares states on both sides or on none")
        # The sums of many small distances lose their last digits in bfloat16, and with them the gradient.
        with torch.autocast(pred_action.device.type, enabled=False):
            predicted_BD, wanted_BD = self._points(pred_action, state_pred), self._points(target_action, state_target)
            cost: Tensor = self.transport(predicted_BD, wanted_BD)
        return cost

    def _points(self, action: Tensor, state: Tensor | None) -> Tensor:
        parts = [action.flatten(1)] + ([] if state is None else [math.sqrt(self.lam_state) * state.flatten(1)])
        kind = torch.promote_types(action.dtype, torch.float32)
        return torch.cat([part.to(kind) for part in parts], dim=1)

    def _cost(self, x: Tensor, y: Tensor) -> Tensor:
        # By differences: as a product of matrices, points that are close would lose what they differ by.
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** self.p


class RouterZLoss:
    """Keep the logits of a gate small: the mean of their squared log-sum-exp."""

    def build(self) -> nn.Module:
        """Return the module of (logits)."""
        return _Function(router_z_loss)


class LoadBalancing:
    """Spread samples over experts: experts times the sum of (share of choices) x (mean probability); 1 when even."""

    def build(self) -> nn.Module:
        """Return the module of (probabilities, chosen)."""
        return _Function(load_balancing_loss)


class _Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Tensor:
        found: Tensor = self.function(*values)
        return found


def router_z_loss(logits_BE: Tensor) -> Tensor:
    """Return the mean over samples of the squared log-sum-exp of a gate's logits."""
    return torch.logsumexp(logits_BE.float(), dim=-1).square().mean()


def load_balancing_loss(probabilities_BE: Tensor, chosen_BE: Tensor) -> Tensor:
    """Return how unevenly samples go to experts: 1 where all get the same share, up to E where one gets everything.

    Args:
        probabilities_BE: The gate's probabilities, through which the gradient flows.
        chosen_BE: 1 where a sample went to an expert, one or several for each sample.
    """
    probabilities_BE, chosen_BE = probabilities_BE.float().flatten(0, -2), chosen_BE.float().flatten(0, -2)
    share_E = chosen_BE.sum(0) / chosen_BE.sum().clamp(min=1.0)
    return probabilities_BE.shape[-1] * (share_E * probabilities_BE.mean(0)).sum()
