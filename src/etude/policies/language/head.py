"""Log-probabilities of chosen tokens from hidden states, without keeping more of the logits than needed.

The head over the vocabulary is a fifth of a small model's work and nearly all of its memory: only the states that
predict a counted token go through it, and its gradient is written over the logits in place.

Shape letters: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

KEPT_LOGITS = 64 << 20
"""Logits kept for the backward pass (256 MB of float32); beyond, they are computed again there, chunk by chunk."""
CHUNK_LOGITS = 16 << 20


class LogProbs(NamedTuple):
    """What `LanguageModel.log_probs` knows about each token, as (B, T); zero where no token counts."""

    log_probs: Tensor
    values: Tensor | None = None
    """Of the state before the token, by the value head."""
    entropy: Tensor | None = None
    """Of the distribution that the token was drawn from."""


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
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, tokens_N, float(temperature), with_entropy
    )
    return log_probs, entropy if with_entropy else None


def pick_log_probs(
    logits_NV: Tensor, tokens_N: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Do the same from logits, for models whose logits are more than a linear map of the hidden state."""
    scaled = functional.log_softmax(logits_NV / temperature, dim=-1)
    entropy = -(scaled.exp() * scaled).sum(-1) if with_entropy else None
    return scaled.gather(1, tokens_N[:, None]).squeeze(1), entropy


class _TokenLogProbs(torch.autograd.Function):
    """log p = x[token] - logsumexp(x), and H = logsumexp(x) - sum p x, with x = (hidden W' + b) / temperature."""

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
        log_probs, norms = hidden.new_empty(hidden.shape[0]), hidden.new_empty(hidden.shape[0])
        entropy = hidden.new_zeros(hidden.shape[0] if with_entropy else 0)
        kept = []
        for start in range(0, hidden.shape[0], chunk):
            span = slice(start, start + chunk)
            logits = functional.linear(hidden[span], weight, bias)
            if temperature != 1.0:
                logits /= temperature
            norms[span] = torch.logsumexp(logits, -1)
            log_probs[span] = logits.gather(1, tokens[span, None]).squeeze(1) - norms[span]
            if with_entropy:
                logs = logits - norms[span, None]
                entropy[span] = -(logs.exp() * logs).sum(-1)
            if keeps:
                kept.append(logits)
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
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        kept, ctx.kept = ctx.kept, None  # written over below: a second backward computes them again
        for number, start in enumerate(range(0, hidden.shape[0], chunk)):
            span = slice(start, start + chunk)
            if kept is not None:
                logits, kept[number] = kept[number], None
            else:
                logits = functional.linear(hidden[span], weight, bias)
                if temperature != 1.0:
                    logits /= temperature
            grad = (grads[0][span] / temperature)[:, None]
            logits -= norms[span, None]
            if with_entropy:
                slope = (grads[1][span] / temperature)[:, None] * (logits + entropy[span, None])
                delta = logits.exp_().mul_(slope.add_(grad)).neg_()
            else:
                delta = logits.exp_().mul_(-grad)
            delta.scatter_add_(1, tokens[span, None], grad)
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[span])
            if grad_weight is not None:
                grad_weight.addmm_(delta.t(), hidden[span])
            if grad_bias is not None:
                grad_bias += delta.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None
