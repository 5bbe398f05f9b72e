"""Blocks that models of policies are made of; all take the batch first.

Shape letters: B batch, T tokens, S tokens of a memory, D width, C channels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.policies.dit import Attention, TransformerBlock
from etude.policies.mlp import ACTIVATIONS
from etude.policies.transformer import sinusoids
from etude.policies.unet1d import SinusoidalEmbedding


def activation_of(name: str) -> nn.Module:
    """Return an activation by name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is unknown; one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class Perceptron(nn.Sequential):
    """Linear layers with activations between them, over the last dimension.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        hidden: Width of each hidden layer.
        activation: relu, gelu, silu or tanh.
        norm: Normalise each hidden layer (LayerNorm).
        dropout: Probability of dropping a hidden unit in training.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: list[int] | None = None,
        activation: str = "relu",
        norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        widths = [in_features, *(hidden if hidden is not None else [128, 128])]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), *([nn.LayerNorm(width_out)] if norm else [])]
            layers += [activation_of(activation), *([nn.Dropout(dropout)] if dropout else [])]
        super().__init__(*layers, nn.Linear(widths[-1], out_features))


class Conv(nn.Sequential):
    """A convolution, a normalisation and an activation; sizes stay where the stride is 1.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Width of the kernel; odd.
        stride: Step between the places of the output.
        dims: 2 for images, 1 for sequences.
        norm: batch, group or none.
        activation: relu, gelu, silu or tanh; null for none.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        dims: int = 2,
        norm: Literal["batch", "group", "none"] = "batch",
        activation: str | None = "relu",
    ) -> None:
        if dims not in (1, 2) or norm not in ("batch", "group", "none"):
            raise ConfigError(f"dims must be 1 or 2 and norm batch, group or none; got {dims!r} and {norm!r}")
        kind, batch_norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv1d, nn.BatchNorm1d)
        # A normalisation takes the mean away: before it, a bias would be without effect.
        layers: list[nn.Module] = [
            kind(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=norm == "none")
        ]
        if norm != "none":
            groups = next(count for count in (8, 4, 2, 1) if out_channels % count == 0)
            layers.append(batch_norm(out_channels) if norm == "batch" else nn.GroupNorm(groups, out_channels))
        super().__init__(*layers, *([] if activation is None else [activation_of(activation)]))


class Residual(nn.Module):
    """Two convolutions around a shortcut.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output; as many as come in unless given.
        kernel_size: Width of the kernels; odd.
        stride: Step of the first convolution.
        dims: 2 for images, 1 for sequences.
        norm: batch, group or none.
        activation: relu, gelu, silu or tanh.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        kernel_size: int = 3,
        stride: int = 1,
        dims: int = 2,
        norm: Literal["batch", "group", "none"] = "batch",
        activation: str = "relu",
    ) -> None:
        super().__init__()
        out = in_channels if out_channels is None else out_channels
        self.first = Conv(in_channels, out, kernel_size, stride, dims, norm, activation)
        self.second = Conv(out, out, kernel_size, 1, dims, norm, None)
        same = out == in_channels and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else Conv(in_channels, out, 1, stride, dims, norm, None)
        self.activation = activation_of(activation)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the maps one block on."""
        out: Tensor = self.activation(self.second(self.first(maps)) + self.shortcut(maps))
        return out


class FiLM(nn.Module):
    """Scale and shift features by a condition; at first it changes nothing.

    Args:
        features: Width of what is steered, its last dimension.
        condition_dim: Width of the condition.
    """

    def __init__(self, features: int, condition_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(condition_dim, 2 * features)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, condition_BD: Tensor) -> Tensor:
        """Return the steered features, of the same shape as `x`, (B, ..., features)."""
        film = self.linear(condition_BD)
        scale, shift = film.view(film.shape[0], *[1] * (x.dim() - 2), -1).chunk(2, dim=-1)
        return torch.addcmul(shift, x, 1 + scale)


class PositionalEmbedding(nn.Module):
    """Add a position to every token.

    Args:
        width: Width of a token.
        length: Most tokens there are.
        kind: sinusoidal, or learned.
    """

    positions_TD: Tensor

    def __init__(self, width: int, length: int, kind: Literal["sinusoidal", "learned"] = "sinusoidal") -> None:
        super().__init__()
        if kind not in ("sinusoidal", "learned"):
            raise ConfigError(f"kind must be sinusoidal or learned, got {kind!r}")
        if kind == "learned":
            self.positions_TD = nn.Parameter(0.02 * torch.randn(length, width))
        else:
            self.register_buffer("positions_TD", sinusoids(length, width), persistent=False)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return the tokens in their places."""
        count, most = tokens_BTD.shape[1], self.positions_TD.shape[0]
        if count > most:
            raise ConfigError(f"there are {count} tokens, and positions for {most}; make length larger")
        return tokens_BTD + self.positions_TD[:count]


class TimeEmbedding(nn.Module):
    """Embed a time, (B,) or (B, 1), as sines and cosines and two layers over them, (B, width).

    Args:
        width: Width of the embedding; even.
        scale: What times are multiplied by first: 1000 spreads times from 0 to 1.
    """

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.scale = SinusoidalEmbedding(width), scale
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, time_B: Tensor) -> Tensor:
        """Return the embedding, (B, width)."""
        out: Tensor = self.layers(self.embed(self.scale * time_B.flatten()))
        return out


class LearnedTokens(nn.Module):
    """Tokens that are learned and alike for every sample: a class token, or the queries of a decoder.

    Args:
        count: How many.
        width: Width of each.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.tokens_TD = nn.Parameter(0.02 * torch.randn(count, width))

    def forward(self, like: Tensor) -> Tensor:
        """Return the tokens for the batch of `like`, (B, count, width)."""
        return self.tokens_TD.expand(like.shape[0], -1, -1)


class CrossAttention(nn.Module):
    """Let tokens gather from a memory, and add what they find.

    Args:
        width: Width of the tokens.
        heads: Attention heads; divides the width.
        memory_dim: Width of the memory; that of the tokens unless given.
        dropout: Probability of dropping an attention weight in training.
    """

    def __init__(self, width: int, heads: int = 4, memory_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.inward = _adapt(memory_dim, width)

    def forward(self, tokens_BTD: Tensor, memory_BSD: Tensor) -> Tensor:
        """Return the tokens with what they found."""
        out: Tensor = tokens_BTD + self.attention(self.norm(tokens_BTD), self.inward(memory_BSD))
        return out


class TransformerEncoder(nn.Module):
    """Blocks in which tokens look at each other.

    Args:
        width: Width of the tokens.
        depth: Number of blocks.
        heads: Attention heads; divides the width.
        dropout: Probability of dropping, in training.
        causal: Let a token see none that come after it.
        in_features: Width of what comes in; that of the tokens unless given.
    """

    def __init__(
        self,
        width: int,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        causal: bool = False,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        self.inward = _adapt(in_features, width)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads, dropout, memory=False) for _ in range(depth)])
        self.norm, self.causal = nn.LayerNorm(width), causal

    def forward(self, tokens_BTD: Tensor, mask_TT: Tensor | None = None) -> Tensor:
        """Return the tokens, (B, T, width); the mask is true where a token may look."""
        tokens_BTD = self.inward(tokens_BTD)
        mask_TT = _causal(tokens_BTD) if self.causal and mask_TT is None else mask_TT
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD, mask_TT)
        out: Tensor = self.norm(tokens_BTD)
        return out


class TransformerDecoder(nn.Module):
    """Blocks in which tokens look at each other and at a memory.

    Args:
        width: Width of the tokens.
        depth: Number of blocks.
        heads: Attention heads; divides the width.
        dropout: Probability of dropping, in training.
        causal: Let a token see none that come after it.
        in_features: Width of what comes in; that of the tokens unless given.
        memory_dim: Width of the memory; that of the tokens unless given.
    """

    def __init__(
        self,
        width: int,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
        causal: bool = False,
        in_features: int | None = None,
        memory_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.inward, self.memory = _adapt(in_features, width), _adapt(memory_dim, width)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads, dropout, memory=True) for _ in range(depth)])
        self.norm, self.causal = nn.LayerNorm(width), causal

    def forward(self, tokens_BTD: Tensor, memory_BSD: Tensor) -> Tensor:
        """Return the tokens, (B, T, width)."""
        tokens_BTD, memory_BSD = self.inward(tokens_BTD), self.memory(memory_BSD)
        mask_TT = _causal(tokens_BTD) if self.causal else None
        for block in self.blocks:
            tokens_BTD = block(tokens_BTD, mask_TT, memory_BSD)
        out: Tensor = self.norm(tokens_BTD)
        return out


def _adapt(given: int | None, width: int) -> nn.Module:
    return nn.Identity() if given is None or given == width else nn.Linear(given, width)


def _causal(tokens_BTD: Tensor) -> Tensor:
    steps_T = torch.arange(tokens_BTD.shape[1], device=tokens_BTD.device)
    return steps_T.unsqueeze(1) >= steps_T
