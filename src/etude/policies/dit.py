"""Transformers that denoise a sequence of actions: DiT (Peebles and Xie 2023) and that of Diffusion Policy.

Shape letters: B batch, H horizon, A action, T condition tokens, D width of the condition, W width of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError
from etude.policies.unet1d import SinusoidalEmbedding

_POSITION_STD = 0.02


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself, or to a memory."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"hidden_dim {width} must be a multiple of the number of heads, {heads}")
        self.width, self.heads, self.dropout = width, heads, dropout
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x_BHW: Tensor, memory_BTW: Tensor | None = None, mask_HT: Tensor | None = None) -> Tensor:
        """Return what each token gathers, (B, H, W); the mask is true where it may look."""
        if memory_BTW is None:
            query, key, value = self.inward(x_BHW).chunk(3, dim=2)
        else:
            weight, bias, width = self.inward.weight, self.inward.bias, self.width
            query = functional.linear(x_BHW, weight[:width], bias[:width])
            key, value = functional.linear(memory_BTW, weight[width:], bias[width:]).chunk(2, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_HT, dropout_p=dropout)
        out: Tensor = self.outward(found.transpose(1, 2).flatten(2))
        return out


def perceptron(width: int, dropout: float) -> nn.Module:
    """Return what follows the attention in a block."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))


class DiTBlock(nn.Module):
    """Attention and a perceptron, each scaled, shifted and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.perceptron = perceptron(width, dropout)

    def forward(self, x_BHW: Tensor, film_B1W: Tensor) -> Tensor:
        """Return the block's output; `film_B1W` holds six vectors side by side."""
        shift, scale, gate, shift_2, scale_2, gate_2 = film_B1W.chunk(6, dim=2)
        x_BHW = torch.addcmul(x_BHW, gate, self.attention(_modulate(x_BHW, shift, scale)))
        return torch.addcmul(x_BHW, gate_2, self.perceptron(_modulate(x_BHW, shift_2, scale_2)))


class _OnActions(nn.Module):
    """What both begin with: noisy actions as tokens that know their place, and the noise level as a token."""

    def __init__(self, action_dim: int, horizon: int, width: int) -> None:
        super().__init__()
        self.inward = nn.Linear(action_dim, width)
        self.positions = nn.Parameter(torch.empty(1, horizon, width))
        self.embed = SinusoidalEmbedding(width)


class DiT(_OnActions):
    """Predict a sequence of actions from a noisy one, its noise level, and a condition that steers every layer.

    Args:
        action_dim: Width of an action.
        condition_dim: Width of the condition; 0 for none.
        horizon: Actions in the sequence.
        n_layers: Blocks.
        n_heads: Attention heads of a block.
        hidden_dim: Width of a token.
        dropout: Probability of dropping an attention weight or a hidden unit in training.
    """

    def __init__(
        self,
        action_dim: int,
        condition_dim: int,
        horizon: int,
        *,
        n_layers: int = 6,
        n_heads: int = 4,
        hidden_dim: int = 256,
        dropout: float = 0.0,
    ) -> None:
        width = hidden_dim
        super().__init__(action_dim, horizon, width)
        self.step_encoder = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.condition = nn.Linear(condition_dim, width) if condition_dim else None
        self.blocks = nn.ModuleList([DiTBlock(width, n_heads, dropout) for _ in range(n_layers)])
        # One matrix steers all blocks (six vectors each) and the output (two).
        self.film_widths = [6 * width] * n_layers + [2 * width]
        self.film = nn.Linear(width, sum(self.film_widths))
        self.outward = nn.Linear(width, action_dim)
        _initialise(self)
        # Every block starts as the identity, and the prediction as zero.
        for last in (self.film, self.outward):
            nn.init.zeros_(last.weight)

    def forward(self, noisy_BHA: Tensor, time_B: Tensor, condition_BD: Tensor | None = None) -> Tensor:
        """Return the prediction, (B, H, A)."""
        steering_BW = self.step_encoder(self.embed(time_B))
        if condition_BD is not None and self.condition is not None:
            steering_BW = steering_BW + self.condition(condition_BD)
        films = self.film(functional.silu(steering_BW)).unsqueeze(1).split(self.film_widths, dim=2)
        x_BHW = self.inward(noisy_BHA) + self.positions
        for block, film_B1W in zip(self.blocks, films[:-1], strict=True):
            x_BHW = block(x_BHW, film_B1W)
        out: Tensor = self.outward(_modulate(x_BHW, *films[-1].chunk(2, dim=2)))
        return out


class TransformerBlock(nn.Module):
    """Attention to the sequence, to a memory if there is one, and a perceptron, each after a normalisation."""

    def __init__(self, width: int, heads: int, dropout: float, *, memory: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3 if memory else 2)])
        self.attention = Attention(width, heads, dropout)
        self.cross_attention = Attention(width, heads, dropout) if memory else None
        self.perceptron = perceptron(width, dropout)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x_BHW: Tensor, mask_HH: Tensor | None, memory_BTW: Tensor | None = None, mask_HT: Tensor | None = None
    ) -> Tensor:
        """Return the sequence one block on; a mask is true where a token may look."""
        first, *middle, last = self.norms
        x_BHW = x_BHW + self.drop(self.attention(first(x_BHW), mask_HT=mask_HH))
        if self.cross_attention is not None:
            x_BHW = x_BHW + self.drop(self.cross_attention(middle[0](x_BHW), memory_BTW, mask_HT))
        out: Tensor = x_BHW + self.drop(self.perceptron(last(x_BHW)))
        return out


class DenoisingTransformer(_OnActions):
    """Predict a sequence of actions from a noisy one; the noise level and each observation are tokens to look at.

    Args:
        action_dim: Width of an action.
        condition_dim: Width of an observation.
        horizon: Actions in the sequence.
        n_obs_steps: Observations.
        n_layers: Decoder blocks.
        n_heads: Attention heads of a block.
        hidden_dim: Width of a token.
        dropout: Probability of dropping an attention weight or a hidden unit in training.
        causal: Let an action see no later action and no later observation than its own.
    """

    mask_HH: Tensor | None
    mask_HT: Tensor | None

    def __init__(
        self,
        action_dim: int,
        condition_dim: int,
        horizon: int,
        n_obs_steps: int,
        *,
        n_layers: int = 8,
        n_heads: int = 4,
        hidden_dim: int = 256,
        dropout: float = 0.01,
        causal: bool = True,
    ) -> None:
        width = hidden_dim
        super().__init__(action_dim, horizon, width)
        self.condition = nn.Linear(condition_dim, width)
        self.condition_positions = nn.Parameter(torch.empty(1, 1 + n_obs_steps, width))
        self.encoder = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        self.blocks = nn.ModuleList([TransformerBlock(width, n_heads, dropout, memory=True) for _ in range(n_layers)])
        self.norm = nn.LayerNorm(width)
        self.outward = nn.Linear(width, action_dim)
        _initialise(self)
        steps_H1, tokens_T = torch.arange(horizon).unsqueeze(1), torch.arange(1 + n_obs_steps)
        # Token 0 is the noise level, token k the observation of step k - 1.
        self.register_buffer("mask_HH", steps_H1 >= steps_H1.T if causal else None, persistent=False)
        self.register_buffer("mask_HT", steps_H1 >= tokens_T - 1 if causal else None, persistent=False)

    def forward(self, noisy_BHA: Tensor, time_B: Tensor, condition_BTD: Tensor) -> Tensor:
        """Return the prediction, (B, H, A)."""
        time_B1W = self.embed(time_B).unsqueeze(1)
        tokens_BTW = torch.cat([time_B1W, self.condition(condition_BTD)], dim=1) + self.condition_positions
        memory_BTW = self.encoder(tokens_BTW)
        x_BHW = self.inward(noisy_BHA) + self.positions
        for block in self.blocks:
            x_BHW = block(x_BHW, self.mask_HH, memory_BTW, self.mask_HT)
        out: Tensor = self.outward(self.norm(x_BHW))
        return out


def _modulate(x_BHW: Tensor, shift_B1W: Tensor, scale_B1W: Tensor) -> Tensor:
    return torch.addcmul(shift_B1W, functional.layer_norm(x_BHW, x_BHW.shape[-1:]), 1 + scale_B1W)


def _initialise(module: nn.Module) -> None:
    """Start the weights by width, as DiT does.

    Diffusion Policy's transformer starts all of them with a deviation of 0.02, which suits a width of 256 or more; at
    32 the condition then hardly reaches the actions (after 200 steps two chunks were not told apart; here they are).
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)
    for name, parameter in module.named_parameters(recurse=False):
        if name.endswith("positions"):
            nn.init.normal_(parameter, std=_POSITION_STD)
