"""The transformer of ACT and DETR: positions are added to queries and keys at every layer, never to values.

Shape letters: T tokens, B batch, D width. Tokens come first: the heads of (T, B, D) are a view of it, which made an
attention layer of width 128 on a CPU 7 to 15 % faster than with the batch first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


class TimeFirstAttention(nn.Module):
    """Multi-head attention, with the parameters of `torch.nn.MultiheadAttention`.

    Args:
        width: Width of the tokens.
        heads: Number of heads; divides the width.
        dropout: Probability of dropping an attention weight in training.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"the width of a transformer ({width}) must be a multiple of its heads ({heads})")
        self.heads, self.dropout = heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query_TBD: Tensor, key_SBD: Tensor, value_SBD: Tensor, bias_B1S: Tensor | None = None) -> Tensor:
        """Return what each query finds, (T, B, D); `bias_B1S` is added to the scores, -inf for what is not there."""
        parts = zip(
            (query_TBD, key_SBD, value_SBD), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True
        )
        query, key, value = (self._split(functional.linear(tokens, weight, bias)) for tokens, weight, bias in parts)
        query = query * (1.0 / math.sqrt(query.shape[-1]))
        scores = torch.bmm(query, key.transpose(1, 2))
        if bias_B1S is not None:
            scores = scores + bias_B1S.repeat_interleave(self.heads, 0)
        shares = scores.softmax(-1)
        shares = drop(shares, self.dropout, self.training)
        found = torch.bmm(shares, value).transpose(0, 1).reshape(query_TBD.shape)
        out: Tensor = self.out_proj(found)
        return out

    def _split(self, tokens_TBD: Tensor) -> Tensor:
        length, batch, width = tokens_TBD.shape
        return tokens_TBD.view(length, batch * self.heads, width // self.heads).transpose(0, 1)


class FeedForward(nn.Module):
    """Two linear layers around an activation.

    Args:
        width: Width of the tokens.
        hidden: Width between the layers.
        dropout: Probability of dropping a hidden unit in training.
        activation: relu or gelu.
    """

    def __init__(self, width: int, hidden: int, dropout: float, activation: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation {activation!r} is unknown; one of {', '.join(ACTIVATIONS)}")
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation, self.dropout = ACTIVATIONS[activation], dropout

    def forward(self, tokens_TBD: Tensor) -> Tensor:
        """Return the transformed tokens."""
        hidden = drop(self.activation(self.linear1(tokens_TBD)), self.dropout, self.training)
        out: Tensor = self.linear2(hidden)
        return out


class TransformerLayer(nn.Module):
    """What encoder and decoder layers share: residual steps, normalised before or after.

    Args:
        width: Width of the tokens.
        heads: Attention heads.
        hidden: Width inside the feed-forward part.
        dropout: Probability of dropping, everywhere.
        activation: relu or gelu.
        pre_norm: Normalise before each step rather than after it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        dropout: float = 0.1,
        activation: str = "relu",
        pre_norm: bool = False,
    ) -> None:
        super().__init__()
        self.dropout, self.pre_norm = dropout, pre_norm
        self.self_attention = TimeFirstAttention(width, heads, dropout)
        self.feed_forward = FeedForward(width, hidden, dropout, activation)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def before(self, tokens: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a step."""
        return norm(tokens) if self.pre_norm else tokens

    def after(self, tokens: Tensor, change: Tensor, norm: nn.Module) -> Tensor:
        """Return the tokens after a step."""
        change = drop(change, self.dropout, self.training)
        return tokens + change if self.pre_norm else norm(tokens + change)


class EncoderLayer(TransformerLayer):
    """Self-attention and a feed-forward network; see `TransformerLayer`."""

    def forward(
        self, tokens: Tensor, positions: Tensor, bias_B1S: Tensor | None = None, keep: int | None = None
    ) -> Tensor:
        """Return the tokens one layer on; with `keep`, only the first so many, at a fraction of the cost."""
        normed = self.before(tokens, self.norm1)
        placed = normed + positions
        change = self.self_attention(placed[:keep], placed, normed, bias_B1S)
        tokens = self.after(tokens[:keep], change, self.norm1)
        return self.after(tokens, self.feed_forward(self.before(tokens, self.norm2)), self.norm2)


class DecoderLayer(TransformerLayer):
    """Self-attention, attention to a memory, and a feed-forward network; see `TransformerLayer`."""

    def __init__(self, width: int, heads: int, *sizes: Any) -> None:
        super().__init__(width, heads, *sizes)
        self.cross_attention = TimeFirstAttention(width, heads, self.dropout)
        self.norm3 = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, positions: Tensor, memory: Tensor, memory_positions: Tensor) -> Tensor:
        """Return the tokens one layer on.

        Tokens that are alike in all samples may come as a batch of one: they are spread over the batch of the memory
        after the self-attention, which is then computed once.
        """
        normed = self.before(tokens, self.norm1)
        placed = normed + positions
        change = self.self_attention(placed, placed, normed)
        batch = memory.shape[1]
        tokens = self.after(tokens.expand(-1, batch, -1), change.expand(-1, batch, -1), self.norm1)
        normed = self.before(tokens, self.norm2)
        change = self.cross_attention(normed + positions, memory + memory_positions, memory)
        tokens = self.after(tokens, change, self.norm2)
        return self.after(tokens, self.feed_forward(self.before(tokens, self.norm3)), self.norm3)


def drop(values: Tensor, probability: float, training: bool) -> Tensor:
    """Drop values at random in training, and scale the others up.

    On a CPU, torch draws one random number per value, which took a third of a small transformer's step. Sixteen bits
    are enough: four values share a draw, at a third of the cost, and the probability is exact to 1 / 65536.
    """
    if not training or probability <= 0.0:
        return values
    if values.device.type != "cpu":
        return functional.dropout(values, probability)
    count = values.numel()
    bits = torch.randint(-(2**63), 2**63 - 1, ((count + 3) // 4,)).view(torch.int16)[:count].view(values.shape)
    keep = (bits >= round(probability * 65536) - 32768).to(values.dtype).mul_(1.0 / (1.0 - probability))
    return values * keep


def sinusoids(length: int, width: int) -> Tensor:
    """Return the positions of "Attention is all you need", (length, width)."""
    exponents = torch.arange(width, dtype=torch.float64) // 2 * 2 / width
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 10000**exponents
    angles[:, 0::2], angles[:, 1::2] = angles[:, 0::2].sin(), angles[:, 1::2].cos()
    return angles.float()


def sinusoids_2d(height: int, width: int, channels: int) -> Tensor:
    """Return positions in an image as DETR has them: half of the channels for y, half for x, (height * width, C)."""
    half = channels // 2
    frequencies = 10000 ** (torch.arange(half, dtype=torch.float32) // 2 * 2 / half)

    def encode(length: int) -> Tensor:
        places = torch.arange(1, length + 1, dtype=torch.float32) / (length + 1e-6) * (2 * math.pi)
        angles = places[:, None] / frequencies
        return torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=-1).flatten(1)

    y, x = encode(height)[:, None].expand(-1, width, -1), encode(width)[None].expand(height, -1, -1)
    return torch.cat([y, x], dim=-1).flatten(0, 1)
