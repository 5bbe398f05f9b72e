"""A residual perceptron that denoises a short sequence of actions: the cheapest head for states.

Shape letters: B batch, H horizon, A action, D width of the condition, W width of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from etude.policies.unet1d import SinusoidalEmbedding

_STEP_DIM = 64
"""Width of the embedded noise level."""


class DenoisingMLP(nn.Module):
    """Predict a sequence of actions from a noisy one, its noise level, and a condition, all side by side.

    Nothing is shared between the steps of the sequence, so it suits short ones. On one core of a CPU a step of training
    costs a fraction of a UNet's, and small steps in large batches are what states want.

    Args:
        action_dim: Width of an action.
        condition_dim: Width of the condition; 0 for none.
        horizon: Actions in the sequence.
        n_layers: Residual blocks, of two layers each.
        hidden_dim: Width of a layer.
        dropout: Probability of dropping a hidden unit in training.
    """

    def __init__(
        self,
        action_dim: int,
        condition_dim: int,
        horizon: int,
        *,
        n_layers: int = 2,
        hidden_dim: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = SinusoidalEmbedding(_STEP_DIM)
        self.inward = nn.Linear(horizon * action_dim + _STEP_DIM + condition_dim, hidden_dim)
        self.blocks = nn.ModuleList([_residual(hidden_dim, dropout) for _ in range(n_layers)])
        self.outward = nn.Sequential(nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, horizon * action_dim))

    def forward(self, noisy_BHA: Tensor, time_B: Tensor, condition_BD: Tensor | None = None) -> Tensor:
        """Return the prediction, (B, H, A)."""
        parts = [noisy_BHA.flatten(1), self.embed(time_B)]
        x_BW = self.inward(torch.cat(parts if condition_BD is None else [*parts, condition_BD], dim=1))
        for block in self.blocks:
            x_BW = x_BW + block(x_BW)
        out: Tensor = self.outward(x_BW)
        return out.view_as(noisy_BHA)


def _residual(width: int, dropout: float) -> nn.Module:
    last = nn.Linear(width, width)
    nn.init.zeros_(last.weight)  # every block starts as the identity
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), last
    )  # fmt: skip
