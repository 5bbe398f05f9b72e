"""Decoding for Llama models (SmolLM2 is one) over their own weights: what the modules compute, without the modules.

A preallocated cache written in place, grouped attention without copies of keys and values, the projections of small
models joined into one, and nothing else: with a tiny model the modules' Python is nearly all of the time, with
SmolLM2 the growing caches are half of it. Weights are read when a decoder is made, so that it always decodes with the
present ones; LoRA adapters are joined to them where that pays, or stay the two small products that they are.

Below float32, and under autocast, it computes as the modules do: products in the working type, norms and softmax in
float32 (a float16 norm overflows where a state is longer than 256).

Shape letters: P prompts, B rows, T tokens, H hidden, Q query heads, K key heads, G = Q / K, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from etude.policies.language import maps
from etude.policies.language.adapted import is_plain, is_plain_embedding
from etude.policies.language.decoder import CachedDecoder, Decoder
from etude.policies.language.head import as_written, wide, working_type
from etude.policies.language.maps import LayerWeights, Layouts, projections, small
from etude.policies.language.one_row import RowModel


def can_decode(model: Any) -> bool:
    """Tell whether a model is a Llama of the plain kind: no biases, SiLU, fixed rotary frequencies, plain LoRA."""
    config = model.config
    if config.model_type != "llama" or config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
        return False
    kind = str(model.model.rotary_emb.rope_type)
    if "dynamic" in kind or kind == "longrope":
        return False
    read = [*(module for layer in model.model.layers for module in projections(layer)), model.lm_head]
    if not all(is_plain(module) for module in read) or not is_plain_embedding(model.model.embed_tokens):
        return False
    wrapped = [
        module for module in model.modules() if hasattr(module, "base_layer") or hasattr(module, "original_module")
    ]
    known = {id(module) for module in (*read, model.model.embed_tokens)}
    if any(id(module) not in known for module in wrapped):
        return False
    # Adapters joined to weights below float32 would be rounded away: those models decode themselves.
    weight = model.model.embed_tokens.weight
    return not wrapped or working_type(weight) == weight.dtype == wide(weight.dtype)


class LlamaDecoder:
    """Decodes one batch of rows with a Llama's present weights."""

    can_join = True

    def __init__(self, model: Any, steps: int = 0, rows: int = 2) -> None:
        """Read a model's weights, for about so many tokens of so many rows."""
        config, inner = model.config, model.model
        self._layouts = Layouts(model, steps)
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._width = inner.layers[0].self_attn.head_dim
        self._eps = config.rms_norm_eps
        self._embedding, self._final_norm = small(self._layouts.look(inner.embed_tokens)), inner.norm.weight
        self._dtype = working_type(self._embedding.weight)
        """Type of the products; the stream between layers keeps the type of the embedding."""
        self._is_wide = self._dtype == self._embedding.weight.dtype == wide(self._dtype)
        self._head_bias = None if model.lm_head.bias is None else model.lm_head.bias.to(self._dtype)
        self._frequencies = inner.rotary_emb.inv_freq
        self._rotary_scale = inner.rotary_emb.attention_scaling
        self._weights = self._layouts.of(rows)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._mask: Tensor | None = None
        self._column = 0

    @property
    def is_laid_out(self) -> bool:
        """Whether it decodes with a copy of the weights."""
        return self._layouts.is_laid_out

    def prefill(self, tokens_PT: Tensor, lengths: Sequence[int], room: int) -> Tensor:
        """Compute the prompts and return the logits of the next token."""
        with as_written(tokens_PT.device):
            return self._prefill(tokens_PT, lengths, room)

    def _prefill(self, tokens_PT: Tensor, lengths: Sequence[int], room: int) -> Tensor:
        prompts, width = tokens_PT.shape
        ends = torch.tensor(lengths, device=tokens_PT.device)
        columns = torch.arange(width, device=tokens_PT.device)
        positions = (columns[None, :] - (width - ends[:, None])).clamp_(min=0)
        mask = None
        if min(lengths) < width:
            real = columns[None, :] >= width - ends[:, None]
            self._mask = torch.cat((real, real.new_ones(prompts, room)), 1)
            seen = columns[:, None] >= columns[None, :]
            # Padding sees itself, so that no line of the softmax is empty; nothing else sees padding.
            mask = ((seen & real[:, None, :]) | (columns[:, None] == columns[None, :])).unsqueeze(1)
        self._tables = self._rotary(torch.arange(width + room, device=tokens_PT.device))
        self._lengths, self._column = ends, width
        self._is_aligned = mask is None
        cos, sin = (table[positions][:, :, None] for table in self._tables)
        x = self._embed(tokens_PT)
        for layer in self._weights.layers:
            q, k, v = self._project(layer, x, cos, sin)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            self._keys.append(_with_room(k, room))
            self._values.append(_with_room(v, room))
            mixed = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self._heads != self._key_heads
            )
            x = self._finish(layer, x, mixed.transpose(1, 2).reshape(prompts, width, -1))
        return self._logits(x[:, -1])

    def expand(self, prompts: Tensor) -> None:
        """Give each row the prompt of its number."""
        self.keep(prompts)

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append a token to each row and return the logits of the next."""
        with as_written(tokens_B.device):
            return self._step(tokens_B)

    def _step_of_one(self, row: RowModel, token: Tensor) -> Tensor:
        column = self._column
        turn = self._tables[0][column].numpy(), self._tables[1][column].numpy()
        memory = [(keys[0].numpy(), values[0].numpy()) for keys, values in zip(self._keys, self._values, strict=True)]
        found = row.step(self._embed(token)[0].numpy(), turn, memory, column, self._heads // self._key_heads)
        self._column += 1
        self._lengths = self._lengths + 1
        logits = torch.from_numpy(found)[None]
        return logits if self._head_bias is None else logits.add_(self._head_bias)

    def _step(self, tokens_B: Tensor) -> Tensor:
        if self._weights.row is not None and len(tokens_B) == 1:
            return self._step_of_one(self._weights.row, tokens_B)
        rows, width, column = tokens_B.shape[0], self._width, self._column
        heads, keys, group = self._heads, self._key_heads, self._heads // self._key_heads
        if self._is_aligned:
            cos, sin = self._tables[0][column], self._tables[1][column]
        else:
            cos, sin = (table[self._lengths][:, None] for table in self._tables)
        bias = None
        if self._mask is not None:
            seen = self._mask[:, : column + 1]
            bias = torch.zeros(seen.shape, dtype=self._dtype, device=cos.device).masked_fill_(~seen, -torch.inf)
            bias = bias[:, None, None].expand(-1, keys, 1, -1).reshape(rows * keys, 1, -1)
        scale = width**-0.5
        x = self._embed(tokens_B)
        for number, layer in enumerate(self._weights.layers):
            q, k, v = self._project(layer, x, cos, sin)
            cached_k, cached_v = self._keys[number], self._values[number]
            cached_k[:, :, column], cached_v[:, :, column] = k, v
            all_k = cached_k.view(rows * keys, -1, width)[:, : column + 1]
            all_v = cached_v.view(rows * keys, -1, width)[:, : column + 1]
            q = q.reshape(rows * keys, group, width)
            if not self._is_wide:
                q = q * scale  # before the product, which float16 could not hold
                scores = torch.bmm(q, all_k.transpose(1, 2)) if bias is None else torch.baddbmm(bias, q, all_k.mT)
                shares = torch.softmax(scores, -1, dtype=torch.float32).to(self._dtype)
            else:
                if bias is None:
                    scores = torch.bmm(q, all_k.transpose(1, 2)).mul_(scale)
                else:
                    scores = torch.baddbmm(bias, q, all_k.transpose(1, 2), alpha=scale)
                shares = torch.softmax(scores, -1)
            mixed = torch.bmm(shares, all_v).view(rows, heads * width)
            x = self._finish(layer, x, mixed)
        self._column += 1
        self._lengths = self._lengths + 1
        return self._logits(x)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self._lengths = self._lengths[rows]
        self._mask = None if self._mask is None else self._mask[rows]
        self._keys = [keys.index_select(0, rows) for keys in self._keys]
        self._values = [values.index_select(0, rows) for values in self._values]

    def another(self, rows: int) -> Self:
        """Return a decoder of the same weights for so many rows that has read nothing."""
        found = copy(self)
        found._weights = self._layouts.of(rows)
        found._keys, found._values, found._mask, found._column = [], [], None, 0
        return found

    def join(self, other: Self, room: int) -> None:
        """Take in the rows of another decoder after its own, with room for so many tokens more."""
        lengths = torch.cat((self._lengths, other._lengths))
        width = int(lengths.max())
        columns = torch.arange(width, device=lengths.device)
        real = columns[None, :] >= width - lengths[:, None]
        self._is_aligned = bool((lengths == width).all())
        self._mask = None if self._is_aligned else torch.cat((real, real.new_ones(len(lengths), room)), 1)
        if width + room > len(self._tables[0]):
            self._tables = self._rotary(torch.arange(width + room, device=lengths.device))
        ends = self._column, other._column
        self._keys = [_together(pair, ends, width, room) for pair in zip(self._keys, other._keys, strict=True)]
        self._values = [_together(pair, ends, width, room) for pair in zip(self._values, other._values, strict=True)]
        self._lengths, self._column = lengths, width
        self._weights = self._layouts.of(len(lengths))

    def _project(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, as (..., heads, D)."""
        normed = self._norm(x, layer.attention_norm)
        parts = layer.qkv(normed)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        joined = joined.view(*x.shape[:-1], -1, self._width)
        turned = self._heads + self._key_heads
        both, v = joined[..., :turned, :], joined[..., turned:, :]
        turned_halves = both.roll(self._width // 2, -1)
        if self._is_wide:
            both = torch.addcmul(both * cos, turned_halves, sin)
        else:
            both = (both * cos + turned_halves * sin).to(self._dtype)
        return both[..., : self._heads, :], both[..., self._heads :, :], v

    def _finish(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + layer.out(mixed)[0]
        normed = self._norm(x, layer.mlp_norm)
        both = layer.gate_up(normed)
        gate, up = both[0].chunk(2, -1) if len(both) == 1 else both
        return x + layer.down(functional.silu(gate).mul_(up))[0]

    def _embed(self, tokens: Tensor) -> Tensor:
        weight, down, up, scale = self._embedding
        x = functional.embedding(tokens, weight)
        if down is None or up is None:
            return x
        return x + functional.linear(functional.embedding(tokens, up), down.t()).mul_(scale)

    def _logits(self, x: Tensor) -> Tensor:
        normed = self._norm(x, self._final_norm)
        (found,) = self._weights.head(normed)
        return found if self._head_bias is None else found.add_(self._head_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x times weight over its root mean square; torch's own takes a third longer on small inputs."""
        if not self._is_wide:
            normed = x.float()
            normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self._eps)
            return (weight * normed.to(x.dtype)).to(self._dtype)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = length.square_().mul_(1 / x.shape[-1]).add_(self._eps)
        return (x * weight).mul_(mean.rsqrt_())

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines by position, the latter signed for halves that change places."""
        angles = positions[:, None].float() * self._frequencies.float()[None, :]
        cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
        dtype = self._embedding.weight.dtype
        return torch.cat((cos, cos), 1).to(dtype), torch.cat((-sin, sin), 1).to(dtype)


def _with_room(values: Tensor, room: int) -> Tensor:
    """Return keys or values (P, K, T, D) at the start of memory for `room` more columns."""
    prompts, heads, length, width = values.shape
    memory = values.new_empty(prompts, heads, length + room, width)
    memory[:, :, :length] = values
    return memory


def _together(parts: tuple[Tensor, Tensor], ends: tuple[int, int], width: int, room: int) -> Tensor:
    """Return the last columns of keys or values of two batches, ending in the same one, before room for more."""
    first = parts[0]
    memory = first.new_empty(sum(map(len, parts)), first.shape[1], width + room, first.shape[3])
    row = 0
    for part, end in zip(parts, ends, strict=True):
        taken, rows = min(end, width), slice(row, row + len(part))
        memory[rows, :, : width - taken] = 0  # seen by none, but multiplied: it must be numbers
        memory[rows, :, width - taken : width] = part[:, :, end - taken : end]
        row += len(part)
    return memory


class Decoders:
    """Makes decoders of a model, one for each call that draws."""

    def __init__(self) -> None:
        self.keeps = False
        """Whether weights that were laid out are kept for the next decoder: for models that change only when
        `forget` is called."""
        self._kept: LlamaDecoder | None = None

    def make(self, model: Any, steps: int = 0, rows: int = 2) -> Decoder:
        """Return a decoder for about so many tokens of so many rows."""
        if self._kept is not None and steps >= maps.MERGE_STEPS:
            return self._kept.another(rows)
        if not can_decode(model):
            return CachedDecoder(model)
        found = LlamaDecoder(model, steps, rows)
        if self.keeps and found.is_laid_out:
            self._kept = found.another(rows)
        return found

    def forget(self) -> None:
        """Drop the weights that are kept."""
        self._kept = None
