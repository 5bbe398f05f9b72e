"""Log-probabilities of chosen tokens from hidden states, without keeping more of the logits than needed.

The head over the vocabulary is a fifth of a small model's work and nearly all of its memory: only the states that
predict a counted token go through it, and its gradient is written over the logits in place.

Logits are the model's own, in its own type; what is made of them (softmax, entropy, sums) is float32 at least: in
bfloat16 a log-probability of -20 is known to 1/8 only.

Shape letters: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

KEPT_LOGITS = 64 << 20
"""Logits kept for the backward pass (256 MB of float32); beyond, they are computed again there, chunk by chunk."""
CHUNK_LOGITS = 16 << 20
NEVER = -1e4
"""A log-probability below which nothing is ever drawn: its exponential is 0 in every type, float64 included."""


class LogProbs(NamedTuple):
    """What `LanguageModel.log_probs` knows about each token, as (B, T); zero where no token counts."""

    log_probs: Tensor
    values: Tensor | None = None
    """Of the state before the token, by the value head."""
    entropy: Tensor | None = None
    """Of the distribution that the token was drawn from."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum and take logarithms in: float32 for anything below it."""
    return torch.promote_types(dtype, torch.float32)


def working_type(tensor: Tensor) -> torch.dtype:
    """Return the type that a matrix product of a tensor is computed in here: its own, or autocast's."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(kind)


def as_written(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast changes no types."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def entropy_of(log_probs_NV: Tensor) -> Tensor:
    """Return the entropy of distributions from their log-probabilities; what has none (-inf) adds nothing."""
    return -(log_probs_NV.exp() * log_probs_NV.clamp(min=NEVER)).sum(-1)


def token_log_probs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each token under softmax(logits / temperature), and the entropy if asked."""
    dtype = working_type(hidden_NH)
    hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, tokens_N, float(temperature), with_entropy
    )
    return log_probs, entropy if with_entropy else None


def module_log_probs(
    head: Any, hidden_NH: Tensor, tokens_N: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Do the same with a head that is more than its weight, such as one with adapters, by calling it."""
    size = int(head.weight.shape[0])
    chunk, keeps = max(1, CHUNK_LOGITS // size), hidden_NH.shape[0] * size <= KEPT_LOGITS

    def compute(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy = pick_log_probs(head(hidden), tokens, temperature, with_entropy)
        return log_probs, log_probs.new_zeros(0) if entropy is None else entropy

    parts = []
    for start in range(0, hidden_NH.shape[0], chunk):
        given = hidden_NH[start : start + chunk], tokens_N[start : start + chunk]
        parts.append(compute(*given) if keeps else checkpoint(compute, *given, use_reentrant=False))
    log_probs, entropy = (torch.cat(found) for found in zip(*parts, strict=True))
    return log_probs, entropy if with_entropy else None


def pick_log_probs(
    logits_NV: Tensor, tokens_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Do the same from logits, for models whose logits are more than a linear map of the hidden state."""
    scaled = functional.log_softmax(logits_NV.to(wide(logits_NV.dtype)) / temperature, dim=-1)
    return scaled.gather(1, tokens_N[:, None]).squeeze(1), entropy_of(scaled) if with_entropy else None


class _TokenLogProbs(torch.autograd.Function):
    """log p = x[token] - logsumexp(x), and H = -sum p log p, with x = (hidden W' + b) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, CHUNK_LOGITS // weight.shape[0])
        keeps = hidden.shape[0] * weight.shape[0] <= KEPT_LOGITS
        log_probs = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        norms, entropy = torch.empty_like(log_probs), log_probs.new_zeros(hidden.shape[0] if with_entropy else 0)
        kept = []
        with as_written(hidden.device):
            for start in range(0, hidden.shape[0], chunk):
                span = slice(start, start + chunk)
                raw = functional.linear(hidden[span], weight, bias)
                logits = _scaled(raw, temperature)
                norms[span] = torch.logsumexp(logits, -1)
                log_probs[span] = logits.gather(1, tokens[span, None]).squeeze(1) - norms[span]
                if with_entropy:
                    entropy[span] = entropy_of(logits - norms[span, None])
                if keeps:
                    kept.append(raw)  # of float32 these are the scaled ones
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.kept = kept if keeps and needed else None
        ctx.settings = temperature, with_entropy, chunk
        ctx.save_for_backward(hidden, weight, bias, tokens, norms, entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, norms, entropy = ctx.saved_tensors
        temperature, with_entropy, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks are added up in float32 at least, as the rows of each are within the product.
        grad_weight = torch.zeros_like(weight, dtype=norms.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=norms.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, None  # written over below: a second backward computes them again
        with as_written(hidden.device):
            for number, start in enumerate(range(0, hidden.shape[0], chunk)):
                span = slice(start, start + chunk)
                if kept is not None:
                    raw, kept[number] = kept[number], None
                    logits = raw if raw.dtype == norms.dtype else _scaled(raw, temperature)
                else:
                    logits = _scaled(functional.linear(hidden[span], weight, bias), temperature)
                grad = (grads[0][span] / temperature)[:, None]
                logits -= norms[span, None]
                if with_entropy:
                    slope = (logits.clamp(min=NEVER) + entropy[span, None]).mul_(
                        (grads[1][span] / temperature)[:, None]
                    )
                    delta = logits.exp_().mul_(slope.add_(grad)).neg_()
                else:
                    delta = logits.exp_().mul_(-grad)
                delta.scatter_add_(1, tokens[span, None], grad)
                if grad_bias is not None:
                    grad_bias += delta.sum(0)
                delta = delta.to(weight.dtype)
                if grad_hidden is not None:
                    torch.mm(delta, weight, out=grad_hidden[span])
                if grad_weight is not None and grad_weight.dtype == delta.dtype:
                    grad_weight.addmm_(delta.t(), hidden[span])
                elif grad_weight is not None:
                    grad_weight += torch.mm(delta.t(), hidden[span])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None, None, None,
        )  # fmt: skip


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits over the temperature, in float32 at least; those that are float32 are written over."""
    logits = logits.to(wide(logits.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)
