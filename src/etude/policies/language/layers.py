"""The layers of a plain Llama for training on a CPU: what the modules compute, in fewer passes over memory.

A layer is two functions with attention between them, each with its gradient written by hand: norm, projections and
rotation before it; projection, norm, the gated product and both sums after it. What is cheap is computed again in the
backward pass instead of kept (norms, the gated product), elementwise work goes through the cache block by block, and
products that oneDNN does faster than MKL go there. LoRA adapters are two more products beside each, of which only the
states between the two are kept.

Shape letters: T tokens, H hidden, I intermediate, D head width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from etude.extras import import_extra
from etude.policies.language.adapted import has_dropout, read
from etude.policies.language.head import HAS_ONEDNN, working_type
from etude.policies.language.llama import can_decode

ONEDNN_ABOVE = 1 << 25
"""Products of more multiplications than this go to oneDNN, which is 5 to 15 % faster than MKL with SmolLM2's; below,
its call and the making of a kernel for every new number of tokens cost more than that."""
BLOCK = 1 << 17
"""Numbers that pass through elementwise work at a time: 0.5 MB of float32, of which a few stay in the cache."""


def can_train(model: Any) -> bool:
    """Tell whether the layers of a model are computed here: a plain Llama of float32 on a CPU, and nobody looks on.

    Hooks, replaced forwards, other types, dropout, and checkpointed or compiled layers are left to the modules.
    """
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or working_type(weight) != torch.float32:
        return False
    if getattr(model, "is_gradient_checkpointing", False) or torch.compiler.is_compiling():
        return False
    if model.config.model_type != "llama" or (model.training and model.config.attention_dropout):
        return False
    kinds = import_extra("transformers.models.llama.modeling_llama", "llm")
    known = {
        kinds.LlamaForCausalLM, kinds.LlamaModel, kinds.LlamaDecoderLayer, kinds.LlamaAttention, kinds.LlamaMLP,
        kinds.LlamaRMSNorm, kinds.LlamaRotaryEmbedding, torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList,
    }  # fmt: skip
    if (adapters := sys.modules.get("peft.tuners.lora.layer")) is not None:
        known |= {adapters.Linear, adapters.Embedding, torch.nn.ModuleDict, torch.nn.ParameterDict}
    watched = torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return not watched and can_decode(model) and not any(_is_other(module, known) for module in model.modules())


def _is_other(module: Any, known: set[Any]) -> bool:
    """Tell whether a module is of no known kind (activations aside, `can_decode` knows them), or does more than it."""
    own = module.__dict__
    has_hooks = any(own[f"_{when}_hooks"] for when in ("forward", "forward_pre", "backward", "backward_pre"))
    is_known = type(module) in known or not (own["_parameters"] or own["_modules"])
    does_more = has_hooks or not is_known or "forward" in own or has_dropout(module)
    return bool(does_more or _has_other_weights(own["_parameters"].values()))


def _has_other_weights(weights: Any) -> bool:
    return any(
        weight is not None and (type(weight) is not torch.nn.Parameter or weight.dtype != torch.float32)
        for weight in weights
    )


def hidden_states(model: Any, tokens_RW: Tensor, positions_RW: Tensor, mask: Tensor | None, rows_N: Tensor) -> Tensor:
    """Return the last hidden states of some tokens, by their number in the flattened lines: (N, H)."""
    inner = model.model
    x = inner.embed_tokens(tokens_RW)
    cos, sin = (table.flatten(0, 1)[:, None] for table in inner.rotary_emb(x, positions_RW))
    lines, x = tokens_RW.shape, x.flatten(0, 1)
    cos, sin = cos.expand(x.shape[0], 1, -1), sin.expand(x.shape[0], 1, -1)
    interfaces = import_extra("transformers.modeling_utils", "llm").ALL_ATTENTION_FUNCTIONS
    attend = interfaces[model.config._attn_implementation]
    for layer in inner.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norm, linears = layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        projected = _Project.apply(  # type: ignore[no-untyped-call]
            x, norm.weight, norm.variance_epsilon, cos, sin, *_tensors(linears)
        )
        q, k, v = (each.view(*lines, -1, attention.head_dim).transpose(1, 2) for each in projected)
        mixed, _ = attend(attention, q, k, v, mask, dropout=0.0, scaling=attention.scaling)
        norm, linears = layer.post_attention_layernorm, [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        x = _Finish.apply(  # type: ignore[no-untyped-call]
            x, mixed.reshape(x.shape[0], -1), norm.weight, norm.variance_epsilon, *_tensors(linears)
        )
    found: Tensor = _Norm.apply(x[rows_N], inner.norm.weight, inner.norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return found


def _tensors(linears: Sequence[Any]) -> list[Tensor | None]:
    """Return the weights of linear layers, and after them the two of each one's adapters, if any has some."""
    found = [read(linear) for linear in linears]
    adapters = [part for one in found for part in (one.down, one.scaled_up)]
    weights: list[Tensor | None] = [one.weight for one in found]
    return weights if all(part is None for part in adapters) else weights + adapters


class _Norm(torch.autograd.Function):
    """y = w x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return _normed(x, weight, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        return *_norm_backward(grad, x, weight, scale), None


class _Project(torch.autograd.Function):
    """Queries and keys, rotated, and values of normed states."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, *tensors: Tensor) -> Any:
        scale = _scale(x, eps)
        normed = _normed(x, norm, scale)
        weights, adapters = tensors[:3], _pairs(tensors[3:], 3)
        lows = _lows(normed, adapters)
        q, k, v = (_raised(_product(normed, weights[at]), lows[at], adapters[at]) for at in range(3))
        ctx.count = len(tensors)
        ctx.save_for_backward(x, norm, scale, cos, sin, *tensors, *lows)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, scale, cos, sin, *kept = ctx.saved_tensors
        weights, lows, adapters = kept[:3], kept[ctx.count :], _pairs(kept[3 : ctx.count], 3)
        turned = (*(_rotated(grad, cos, -sin) for grad in grads[:2]), grads[2])
        normed, found = _normed(x, norm, scale), None
        for grad, weight in zip(turned, weights, strict=True):
            found = _product(grad, weight.t(), found)
        assert found is not None
        needs = ctx.needs_input_grad
        for_adapters = _through(turned, normed, lows, adapters, needs[8:], found)
        for_x, for_norm = _norm_backward(found, x, norm, scale)
        return for_x, for_norm, None, None, None, *_for_weights(turned, normed, needs[5:8]), *for_adapters


class _Finish(torch.autograd.Function):
    """m = x + o mixed, and then m + down (silu(gate n) * up n) with n = norm(m)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mixed: Tensor, norm: Tensor, eps: float, *tensors: Tensor) -> Tensor:
        (out, gate, up, down), adapters = tensors[:4], _pairs(tensors[4:], 4)
        (low_out,) = _lows(mixed, adapters[:1])
        middle = _raised(_product(mixed, out, x), low_out, adapters[0])
        scale = _scale(middle, eps)
        normed = _normed(middle, norm, scale)
        low_gate, low_up = _lows(normed, adapters[1:3])
        gates = _raised(_product(normed, gate), low_gate, adapters[1])
        ups = _raised(_product(normed, up), low_up, adapters[2])
        passed = _gated(gates, ups)
        (low_down,) = _lows(passed, adapters[3:])
        ctx.count = len(tensors)
        ctx.save_for_backward(mixed, middle, norm, scale, gates, ups, *tensors, low_out, low_gate, low_up, low_down)
        return _raised(_product(passed, down, middle), low_down, adapters[3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, middle, norm, scale, gates, ups, *kept = ctx.saved_tensors
        (out, gate, up, down), lows, adapters = kept[:4], kept[ctx.count :], _pairs(kept[4 : ctx.count], 4)
        needs, wants = ctx.needs_input_grad[4:8], ctx.needs_input_grad[8:]
        for_gates = _product(grad, down.t())
        through = _lowered(grad, adapters[3], for_gates)
        passed, for_ups = _gated_backward(for_gates, gates, ups)
        last = _for_adapters((grad,), passed, lows[3:], through, wants[6:])
        (for_down,) = _for_weights((grad,), passed, needs[3:])
        normed = _normed(middle, norm, scale)
        for_gate, for_up = _for_weights((for_gates, for_ups), normed, needs[1:3])
        for_normed = _product(for_ups, up.t(), _product(for_gates, gate.t()))
        inner = _through((for_gates, for_ups), normed, lows[1:3], adapters[1:3], wants[2:6], for_normed)
        for_middle, for_norm = _norm_backward(for_normed, middle, norm, scale, grad)
        (for_out,) = _for_weights((for_middle,), mixed, needs[:1])
        for_mixed = _product(for_middle, out.t())
        first = _through((for_middle,), mixed, lows[:1], adapters[:1], wants[:2], for_mixed)
        return for_middle, for_mixed, for_norm, None, for_out, for_gate, for_up, for_down, *first, *inner, *last


_Pair = tuple[Tensor | None, Tensor | None]


def _pairs(adapters: Sequence[Tensor | None], count: int) -> list[_Pair]:
    """Return the two matrices of each layer's adapters; none where it has none."""
    return list(zip(adapters[::2], adapters[1::2], strict=True)) if adapters else [(None, None)] * count


def _lows(x: Tensor, adapters: Sequence[_Pair]) -> list[Tensor | None]:
    """Return states between the two matrices of each layer that reads x, by one product for all of them."""
    downs = [down for down, _ in adapters if down is not None]
    if not downs:
        return [None] * len(adapters)
    found = torch.mm(x, (downs[0] if len(downs) == 1 else torch.cat(downs)).t())
    parts = iter(torch.split(found, [down.shape[0] for down in downs], 1))
    return [None if down is None else next(parts) for down, _ in adapters]


def _raised(found: Tensor, low: Tensor | None, pair: _Pair) -> Tensor:
    """Add what comes from adapters to a product, in place."""
    return found if low is None or pair[1] is None else found.addmm_(low, pair[1].t())


def _through(
    grads: Sequence[Tensor],
    x: Tensor,
    lows: Sequence[Tensor | None],
    adapters: Sequence[_Pair],
    needed: Sequence[bool],
    for_x: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of the adapters of layers that read x; what comes through them is added to that of x."""
    through = [_lowered(grad, pair, for_x) for grad, pair in zip(grads, adapters, strict=True)]
    return _for_adapters(grads, x, lows, torch.cat(found, 1) if (found := _present(through)) else None, needed)


def _present(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [one for one in given if one is not None]


def _lowered(grad: Tensor, pair: _Pair, for_x: Tensor) -> Tensor | None:
    """Return the gradient of the states between two matrices, and add that of the states before them in place."""
    down, up = pair
    if down is None or up is None:
        return None
    found = torch.mm(grad, up)
    for_x.addmm_(found, down)
    return found


def _for_adapters(
    grads: Sequence[Tensor], x: Tensor, lows: Sequence[Tensor | None], through: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of both matrices of each layer; `through` has those of the states between, side by side."""
    found: list[Tensor | None] = [None] * len(needed)
    if through is None:
        return found
    downs = iter(torch.split(torch.mm(through.t(), x), [low.shape[1] for low in _present(lows)]))
    for at, (grad, low) in enumerate(zip(grads, lows, strict=True)):
        if low is not None:
            for_down, for_up = next(downs), torch.mm(grad.t(), low) if needed[2 * at + 1] else None
            found[2 * at : 2 * at + 2] = for_down if needed[2 * at] else None, for_up
    return found


def _for_weights(grads: tuple[Tensor, ...], x: Tensor, needed: Any) -> list[Tensor | None]:
    """Return the gradients of the weights that x was multiplied with; those of frozen ones are None."""
    return [torch.mm(grad.t(), x) if one else None for grad, one in zip(grads, needed, strict=True)]


def _product(x: Tensor, weight: Tensor, to: Tensor | None = None) -> Tensor:
    """Return x W', added to something if it is given."""
    if HAS_ONEDNN and x.dtype == torch.float32 and x.shape[0] * weight.numel() > ONEDNN_ABOVE:
        product: Any = torch.ops.mkldnn._linear_pointwise
        found: Tensor = product(x, weight, None, "none", [], "") if to is None else product(x, to, weight, None, "add")
        return found
    return torch.mm(x, weight.t()) if to is None else torch.addmm(to, x, weight.t())


def _blocks(x: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix a few at a time."""
    size = max(1, BLOCK // x.shape[1])
    for start in range(0, x.shape[0], size):
        yield slice(start, start + size)


def _scale(x: Tensor, eps: float) -> Tensor:
    """Return one over the root mean square of each row, (T, 1)."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    found = torch.empty_like(x)
    for rows in _blocks(x):
        torch.mul(x[rows], weight, out=found[rows]).mul_(scale[rows])
    return found


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, to: Tensor | None = None) -> Any:
    """Return the gradients of states, added to something if it is given, and of the norm's weight.

    That of x is s w g - s^3 x mean(w g x), of w the sum of s g x.
    """
    for_x, for_weight = torch.empty_like(x), torch.zeros_like(weight)
    for rows in _blocks(x):
        some, g, s, out = x[rows], grad[rows], scale[rows], for_x[rows]
        both = g * some
        for_weight += torch.mv(both.t(), s.squeeze(1))
        slope = torch.mv(both, weight)[:, None].mul_(s).mul_(s).mul_(s).mul_(-1 / x.shape[1])
        torch.mul(g, weight, out=out).mul_(s).addcmul_(some, slope)
        if to is not None:
            out += to[rows]
    return for_x, for_weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads (T, any number of D) turned by angles (T, 1, D): x cos + (-second half, first half) sin.

    Both halves of the tables are alike, so that the gradient is turned back by -sin.
    """
    width = cos.shape[-1]
    half, heads = width // 2, x.view(x.shape[0], -1, width)
    found = torch.empty_like(heads)
    for rows in _blocks(x):
        some, out, turn = heads[rows], found[rows], sin[rows]
        torch.mul(some, cos[rows], out=out)
        out[..., :half].addcmul_(some[..., half:], turn[..., :half], value=-1)
        out[..., half:].addcmul_(some[..., :half], turn[..., half:])
    return found.view_as(x)


def _gated(gates: Tensor, ups: Tensor) -> Tensor:
    found = torch.empty_like(gates)
    for rows in _blocks(gates):
        torch.mul(functional.silu(gates[rows]), ups[rows], out=found[rows])
    return found


def _gated_backward(grad: Tensor, gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gates) * ups and the gradient of ups; that of gates is written over the given one."""
    passed, for_ups = torch.empty_like(gates), torch.empty_like(gates)
    for rows in _blocks(gates):
        open_, some = functional.silu(gates[rows]), grad[rows]
        torch.mul(open_, ups[rows], out=passed[rows])
        torch.mul(open_, some, out=for_ups[rows])
        torch.ops.aten.silu_backward(some * ups[rows], gates[rows], grad_input=some)
    return passed, for_ups
