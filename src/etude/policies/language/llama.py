"""Decoding for Llama models (SmolLM2 is one) over their own weights: what the modules compute, without the modules.

A preallocated cache written in place, grouped attention without copies of keys and values, the projections of small
models joined into one, and nothing else: with a tiny model the modules' Python is nearly all of the time, with
SmolLM2 the growing caches are half of it. Weights are read when a decoder is made, so that it always decodes with the
present ones.

Shape letters: P prompts, B rows, T tokens, H hidden, Q query heads, K key heads, G = Q / K, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

JOIN_BELOW = 1 << 18
"""Projections with fewer weights than this are joined: copying them costs less than the calls it saves."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; `qkv` and `gate_up` hold one joined matrix or their parts."""

    attention_norm: Tensor
    qkv: tuple[Tensor, ...]
    out: Tensor
    mlp_norm: Tensor
    gate_up: tuple[Tensor, ...]
    down: Tensor


def can_decode(model: Any) -> bool:
    """Tell whether a model is a Llama of the plain kind: no biases, SiLU, fixed rotary frequencies, plain LoRA."""
    config = model.config
    return (
        config.model_type == "llama"
        and config.hidden_act == "silu"
        and not (config.attention_bias or config.mlp_bias)
        and "dynamic" not in str(model.model.rotary_emb.rope_type)
        and str(model.model.rotary_emb.rope_type) != "longrope"
        and all(_is_plain(module) for layer in model.model.layers for module in _projections(layer))
        and type(model.lm_head) is torch.nn.Linear
    )


def _is_plain(module: Any) -> bool:
    """Tell whether a layer is linear, or linear with plain LoRA adapters."""
    if type(module) is torch.nn.Linear:
        return True
    if type(getattr(module, "base_layer", None)) is not torch.nn.Linear or not hasattr(module, "lora_A"):
        return False
    return not getattr(module, "lora_variant", None) and all(name in module.lora_A for name in module.active_adapters)


def effective_weight(module: Any) -> Tensor:
    """Return the weight that a linear layer has together with its LoRA adapters, where they are switched on."""
    base: Tensor = module.base_layer.weight if hasattr(module, "base_layer") else module.weight
    if not hasattr(module, "base_layer") or module.disable_adapters or module.merged:
        return base
    for name in module.active_adapters:
        a, b = module.lora_A[name].weight, module.lora_B[name].weight
        base = torch.addmm(base, b, a, alpha=module.scaling[name])
    return base


def _projections(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )


class LlamaDecoder:
    """Decodes one batch of rows with a Llama's present weights."""

    def __init__(self, model: Any) -> None:
        config, inner = model.config, model.model
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._width = inner.layers[0].self_attn.head_dim
        self._eps = config.rms_norm_eps
        self._embedding, self._final_norm, self._head = inner.embed_tokens.weight, inner.norm.weight, model.lm_head
        self._frequencies = inner.rotary_emb.inv_freq
        self._rotary_scale = inner.rotary_emb.attention_scaling
        self._layers = [_read(layer) for layer in inner.layers]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._mask: Tensor | None = None
        self._column = 0

    def prefill(self, tokens_PT: Tensor, lengths: Sequence[int], room: int) -> Tensor:
        """Compute the prompts and return the logits of the next token."""
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
        x = functional.embedding(tokens_PT, self._embedding)
        for layer in self._layers:
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
        rows, width, column = tokens_B.shape[0], self._width, self._column
        heads, keys, group = self._heads, self._key_heads, self._heads // self._key_heads
        if self._is_aligned:
            cos, sin = self._tables[0][column], self._tables[1][column]
        else:
            cos, sin = (table[self._lengths][:, None] for table in self._tables)
        bias = None
        if self._mask is not None:
            seen = self._mask[:, : column + 1]
            bias = torch.zeros(seen.shape, dtype=cos.dtype, device=cos.device).masked_fill_(~seen, -torch.inf)
            bias = bias[:, None, None].expand(-1, keys, 1, -1).reshape(rows * keys, 1, -1)
        scale = width**-0.5
        x = functional.embedding(tokens_B, self._embedding)
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            cached_k, cached_v = self._keys[number], self._values[number]
            cached_k[:, :, column], cached_v[:, :, column] = k, v
            all_k = cached_k.view(rows * keys, -1, width)[:, : column + 1]
            all_v = cached_v.view(rows * keys, -1, width)[:, : column + 1]
            q = q.reshape(rows * keys, group, width)
            if bias is None:
                scores = torch.bmm(q, all_k.transpose(1, 2)).mul_(scale)
            else:
                scores = torch.baddbmm(bias, q, all_k.transpose(1, 2), alpha=scale)
            mixed = torch.bmm(torch.softmax(scores, -1), all_v).view(rows, heads * width)
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

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, as (..., heads, D)."""
        normed = self._norm(x, layer.attention_norm)
        parts = [functional.linear(normed, weight) for weight in layer.qkv]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        joined = joined.view(*x.shape[:-1], -1, self._width)
        turned = self._heads + self._key_heads
        both, v = joined[..., :turned, :], joined[..., turned:, :]
        both = torch.addcmul(both * cos, both.roll(self._width // 2, -1), sin)
        return both[..., : self._heads, :], both[..., self._heads :, :], v

    def _finish(self, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + functional.linear(mixed, layer.out)
        normed = self._norm(x, layer.mlp_norm)
        if len(layer.gate_up) == 1:
            gate, up = functional.linear(normed, layer.gate_up[0]).chunk(2, -1)
        else:
            gate, up = (functional.linear(normed, weight) for weight in layer.gate_up)
        return x + functional.linear(functional.silu(gate).mul_(up), layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        normed = self._norm(x, self._final_norm)
        return functional.linear(normed, self._head.weight, self._head.bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x times weight over its root mean square; torch's own takes a third longer on small inputs."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = length.square_().mul_(1 / x.shape[-1]).add_(self._eps)
        return (x * weight).mul_(mean.rsqrt_())

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines by position, the latter signed for halves that change places."""
        angles = positions[:, None].float() * self._frequencies.float()[None, :]
        cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
        dtype = self._embedding.dtype
        return torch.cat((cos, cos), 1).to(dtype), torch.cat((-sin, sin), 1).to(dtype)


def _read(layer: Any) -> Layer:
    q, k, v, out, gate, up, down = map(effective_weight, _projections(layer))
    return Layer(
        layer.input_layernorm.weight,
        _joined(q, k, v),
        out,
        layer.post_attention_layernorm.weight,
        _joined(gate, up),
        down,
    )


def _joined(*weights: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat(weights),) if sum(weight.numel() for weight in weights) <= JOIN_BELOW else weights


def _with_room(values: Tensor, room: int) -> Tensor:
    """Return keys or values (P, K, T, D) at the start of memory for `room` more columns."""
    prompts, heads, length, width = values.shape
    memory = values.new_empty(prompts, heads, length + room, width)
    memory[:, :, :length] = values
    return memory
