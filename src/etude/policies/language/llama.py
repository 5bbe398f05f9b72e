"""Decoding for Llama models (SmolLM2 is one) over their own weights: what the modules compute, without the modules.

A preallocated cache written in place, grouped attention without copies of keys and values, the projections of small
models joined into one, and nothing else: with a tiny model the modules' Python is nearly all of the time, with
SmolLM2 the growing caches are half of it. Weights are read when a decoder is made, so that it always decodes with the
present ones.

Below float32, and under autocast, it computes as the modules do: products in the working type, norms and softmax in
float32 (a float16 norm overflows where a state is longer than 256).

Shape letters: P prompts, B rows, T tokens, H hidden, Q query heads, K key heads, G = Q / K, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from etude.policies.language.head import as_written, linear, wide, working_type

JOIN_BELOW = 1 << 18
"""Projections with fewer weights than this are joined: copying them costs less than the calls it saves."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
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
    if config.model_type != "llama" or config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
        return False
    kind = str(model.model.rotary_emb.rope_type)
    if "dynamic" in kind or kind == "longrope":
        return False
    read = [*(module for layer in model.model.layers for module in _projections(layer)), model.lm_head]
    if not all(_is_plain(module) for module in read) or not _is_plain_embedding(model.model.embed_tokens):
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


def _is_plain(module: Any) -> bool:
    """Tell whether a layer is linear, or linear with plain LoRA adapters."""
    if type(module) is torch.nn.Linear:
        return True
    if type(getattr(module, "base_layer", None)) is not torch.nn.Linear or not hasattr(module, "lora_A"):
        return False
    if getattr(module, "lora_variant", None) or any(getattr(module, "lora_bias", {}).values()):
        return False
    return all(name in module.lora_A for name in module.active_adapters)


def _is_plain_embedding(module: Any) -> bool:
    """Tell whether a layer is an embedding, or one with plain LoRA adapters."""
    if type(module) is torch.nn.Embedding:
        return True
    if type(getattr(module, "base_layer", None)) is not torch.nn.Embedding or getattr(module, "lora_variant", None):
        return False
    return all(name in module.lora_embedding_A for name in module.active_adapters)


def effective_weight(module: Any) -> Tensor:
    """Return the weight that a layer has together with its LoRA adapters, where they are switched on."""
    if not hasattr(module, "base_layer"):
        weight: Tensor = module.weight
        return weight
    base: Tensor = module.base_layer.weight
    if module.disable_adapters or module.merged:
        return base
    for name in module.active_adapters:
        if type(module.base_layer) is torch.nn.Embedding:
            a, b = module.lora_embedding_A[name].t(), module.lora_embedding_B[name].t()
        else:
            a, b = module.lora_B[name].weight, module.lora_A[name].weight
        base = torch.addmm(base, a, b, alpha=module.scaling[name])
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
        self._embedding, self._final_norm = effective_weight(inner.embed_tokens), inner.norm.weight
        self._dtype = working_type(self._embedding)
        """Type of the products; the stream between layers keeps the type of the embedding."""
        self._is_wide = self._dtype == self._embedding.dtype == wide(self._dtype)
        self._head = effective_weight(model.lm_head).to(self._dtype)
        self._head_bias = None if model.lm_head.bias is None else model.lm_head.bias.to(self._dtype)
        self._frequencies = inner.rotary_emb.inv_freq
        self._rotary_scale = inner.rotary_emb.attention_scaling
        self._layers = [_read(layer, self._dtype) for layer in inner.layers]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._mask: Tensor | None = None
        self._column = 0

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
        with as_written(tokens_B.device):
            return self._step(tokens_B)

    def _step(self, tokens_B: Tensor) -> Tensor:
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
        x = functional.embedding(tokens_B, self._embedding)
        for number, layer in enumerate(self._layers):
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

    def _project(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, as (..., heads, D)."""
        normed = self._norm(x, layer.attention_norm)
        parts = [functional.linear(normed, weight) for weight in layer.qkv]
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
        x = x + functional.linear(mixed, layer.out)
        normed = self._norm(x, layer.mlp_norm)
        if len(layer.gate_up) == 1:
            gate, up = functional.linear(normed, layer.gate_up[0]).chunk(2, -1)
        else:
            gate, up = (functional.linear(normed, weight) for weight in layer.gate_up)
        return x + functional.linear(functional.silu(gate).mul_(up), layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        normed = self._norm(x, self._final_norm)
        return linear(normed, self._head, self._head_bias)

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
        dtype = self._embedding.dtype
        return torch.cat((cos, cos), 1).to(dtype), torch.cat((-sin, sin), 1).to(dtype)


def _read(layer: Any, dtype: torch.dtype) -> LayerWeights:
    q, k, v, out, gate, up, down = (effective_weight(module).to(dtype) for module in _projections(layer))
    return LayerWeights(
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
