"""Log-probabilities of chosen tokens from hidden states, without keeping more of the logits than needed.

The head over the vocabulary is a fifth of a small model's work: only the states that predict a counted token go through
it, the logits are replaced by what the gradient needs while they are in the cache, and the gradient itself is never
written out: that of -log softmax is a product with exp(logits) but for one row of the weight per token.

Logits are the model's own, in its own type; what is made of them (softmax, entropy, sums) is float32 at least: in
bfloat16 a log-probability of -20 is known to 1/8 only.

Shape letters: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from etude.policies.language.adapted import has_dropout, is_plain, read

KEPT_LOGITS = 256 << 20
"""Logits kept for the backward pass (1 GB of float32, of 5,400 tokens of SmolLM2, whose layers keep six times that);
beyond, they are computed again there, chunk by chunk, which is a third more work."""
CHUNK_LOGITS = 16 << 20
BLOCK_LOGITS = 1 << 18
"""Logits that pass through softmax at a time: 1 MB, which stays in the cache from one step of it to the next."""
HAS_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
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
    low_NR: Tensor | None = None,
    up_VR: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each token under softmax(logits / temperature), and the entropy if asked.

    With `low_NR` and `up_VR`, which are of a type that is summed in, their product is a part of the logits.
    """
    dtype, keeps = working_type(hidden_NH), torch.is_grad_enabled()
    hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, tokens_N, float(temperature), with_entropy, keeps, low_NR, up_VR
    )
    return log_probs, entropy if with_entropy else None


def head_log_probs(
    head: Any, hidden_NH: Tensor, tokens_N: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Do the same with a head: a linear layer, one with plain adapters, or whatever can be called."""
    asked: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
    if type(head) is nn.Linear:
        return token_log_probs(hidden_NH, head.weight, head.bias, tokens_N, **asked)
    if is_plain(head) and not has_dropout(head):
        given, bias = read(head), head.bias
        if given.down is None or given.up is None:
            return token_log_probs(hidden_NH, given.weight, bias, tokens_N, **asked)
        types = {hidden_NH.dtype, given.weight.dtype, given.down.dtype, given.up.dtype, working_type(hidden_NH)}
        if types == {wide(hidden_NH.dtype)}:
            low_NR = functional.linear(hidden_NH, given.down)
            return token_log_probs(
                hidden_NH, given.weight, bias, tokens_N, **asked, low_NR=low_NR, up_VR=given.scaled_up
            )
    return module_log_probs(head, hidden_NH, tokens_N, **asked)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' + b without gradient, by oneDNN if it can: a head of 49,152 rows takes two thirds of MKL's time."""
    can = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and HAS_ONEDNN
    if not can or torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def module_log_probs(
    head: Any, hidden_NH: Tensor, tokens_N: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Do the same with a head that is more than weights, such as one with dropout, by calling it."""
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
    """log p = x[token] - log sum exp x, and H = -sum p log p, with x = (hidden W' + b + low up') / temperature.

    Kept are e = exp(x - max x), written over the logits, and s = sum e. The gradient of log p is W[token] - e W / s for
    the hidden state, and for the weight the same from the other side; only that of the entropy needs log e again. What
    holds for hidden and W holds for low and up, the states and weights of adapters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool,
        wants_grad: bool,
        low: Tensor | None = None,
        up: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        chunk, needs = max(1, CHUNK_LOGITS // weight.shape[0]), ctx.needs_input_grad
        for_hidden, for_weight = (wants_grad and needed for needed in needs[:2])
        for_adapter = wants_grad and low is not None and any(needs[7:])
        # Of a frozen head nothing but e W / s is needed, which is no larger than the hidden states.
        mixes = for_hidden and not (for_weight or with_entropy or (bias is not None and needs[2]) or low is not None)
        keeps = (for_hidden or for_weight or for_adapter) and not mixes
        keeps = keeps and hidden.shape[0] * weight.shape[0] <= KEPT_LOGITS
        log_probs = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        sums, entropy = torch.empty_like(log_probs), log_probs.new_zeros(hidden.shape[0] if with_entropy else 0)
        mixed, kept = torch.empty_like(hidden) if mixes else None, []
        with as_written(hidden.device):
            for start in range(0, hidden.shape[0], chunk):
                span = slice(start, start + chunk)
                logits = _logits(hidden, weight, bias, low, up, span, temperature)
                entropies = entropy[span] if with_entropy else None
                _exponentiate(logits, tokens[span], log_probs[span], sums[span], entropies)
                logits = _narrowed(logits, sums[span], hidden.dtype)
                if mixed is not None:
                    mixed[span] = torch.mm(logits, weight)
                if keeps:
                    kept.append(logits)
        ctx.kept = kept if keeps else None
        ctx.settings = temperature, with_entropy, chunk
        ctx.save_for_backward(hidden, weight, bias, tokens, sums, entropy, mixed, low, up)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, sums, entropy, mixed, low, up = ctx.saved_tensors
        (temperature, with_entropy, chunk), needs = ctx.settings, ctx.needs_input_grad
        gains = (grads[0] / temperature)[:, None]
        shares = -gains / sums[:, None]
        if mixed is not None:
            grad = mixed * shares.to(mixed.dtype) + weight[tokens] * gains.to(weight.dtype)
            return grad, *(None,) * 8
        for_states = [torch.empty_like(one) if need else None for one, need in ((hidden, needs[0]), (low, needs[7]))]
        # Chunks are added up in float32 at least, as the rows of each are within the product.
        trained = ((weight, needs[1]), (up, needs[8]))
        for_weights = [torch.zeros_like(one, dtype=sums.dtype) if need else None for one, need in trained]
        grad_bias = torch.zeros_like(bias, dtype=sums.dtype) if bias is not None and needs[2] else None
        kept, ctx.kept = ctx.kept, None  # freed as they are used: a second backward computes them again
        with as_written(hidden.device):
            for number, start in enumerate(range(0, hidden.shape[0], chunk)):
                span = slice(start, start + chunk)
                gain, share = gains[span], shares[span]
                if kept is not None:
                    powers, kept[number] = kept[number], None
                else:
                    powers = _logits(hidden, weight, bias, low, up, span, temperature)
                    powers -= powers.amax(-1, keepdim=True)
                    powers = _narrowed(powers.exp_(), None, hidden.dtype)
                if with_entropy:
                    slope = (grads[1][span] / temperature)[:, None]
                    powers, share = _with_entropy(powers, sums[span], entropy[span], gain, slope), torch.ones_like(gain)
                for states, matrix, *found in zip((hidden, low), (weight, up), for_states, for_weights, strict=True):
                    _add_gradients(powers, tokens[span], gain, share, states, matrix, found, span)
                if grad_bias is not None:
                    grad_bias += torch.mv(powers.t(), share.squeeze(1).to(powers.dtype))
                    grad_bias.index_add_(0, tokens[span], gain.squeeze(1))
        grad_weight, grad_bias, grad_up = (
            None if found is None else found.to(weight.dtype) for found in (for_weights[0], grad_bias, for_weights[1])
        )
        return for_states[0], grad_weight, grad_bias, *(None,) * 4, for_states[1], grad_up


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, low: Any, up: Any, span: slice, temperature: float
) -> Tensor:
    """Return some rows of the logits over the temperature, in float32 at least."""
    found = linear(hidden[span], weight, bias)
    return _scaled(found if low is None else found.addmm_(low[span], up.t()), temperature)


def _add_gradients(
    powers: Tensor, tokens: Tensor, gain: Tensor, share: Tensor, all_states: Any, matrix: Any, found: Any, span: slice
) -> None:
    """Write the gradient of some states, and add theirs to that of the matrix they are multiplied with, if wanted."""
    for_states, for_matrix = found
    if for_states is not None:
        torch.mm(powers, matrix, out=for_states[span])
        for_states[span].mul_(share).add_((matrix[tokens] * gain).to(matrix.dtype))
    if for_matrix is not None:
        states = all_states[span]
        weighed, own = (states * share).to(powers.dtype), (states * gain).to(for_matrix.dtype)
        if for_matrix.dtype == powers.dtype:
            for_matrix.addmm_(powers.t(), weighed)
        else:
            for_matrix += torch.mm(powers.t(), weighed)
        for_matrix.index_add_(0, tokens, own)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return logits over the temperature, in float32 at least; those that are float32 are written over."""
    logits = logits.to(wide(logits.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _exponentiate(logits: Tensor, tokens: Tensor, log_probs: Tensor, sums: Tensor, entropy: Tensor | None) -> None:
    """Replace logits by exp(x - max x), and write log-probabilities, sums and entropies of the rows."""
    block = max(1, BLOCK_LOGITS // logits.shape[1])
    for start in range(0, logits.shape[0], block):
        rows = slice(start, start + block)
        x = logits[rows]
        x -= x.amax(-1, keepdim=True)
        chosen = x.gather(1, tokens[rows, None]).squeeze(1)
        shifted = None if entropy is None else x.clamp(min=NEVER)
        sums[rows] = x.exp_().sum(-1)
        norms = sums[rows].log()
        log_probs[rows] = chosen - norms
        if entropy is not None and shifted is not None:
            entropy[rows] = norms - shifted.mul_(x).sum(-1) / sums[rows]


def _narrowed(powers: Tensor, sums: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return exp(x - max x) in the working type; below float32 as probabilities, for products could overflow."""
    if powers.dtype == dtype:
        return powers
    powers /= powers.sum(-1, keepdim=True)
    if sums is not None:
        sums.fill_(1.0)
    return powers.to(dtype)


def _with_entropy(powers: Tensor, sums: Tensor, entropy: Tensor, gain: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient of gain log p[token] + slope H by the logits, but for the token's own gain."""
    shares = powers.to(sums.dtype) / sums[:, None]
    slopes = shares.log().clamp_(min=NEVER).add_(entropy[:, None]).mul_(slope).add_(gain)
    return shares.mul_(slopes).neg_().to(powers.dtype)
