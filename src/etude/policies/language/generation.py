"""Complete prompts: each distinct prompt computed once, rows that are finished leave the batch.

Rows differ from the same rows in another batch only by the last bits of their logits (matrix products of another
shape round differently); the same calls give the same completions, bit for bit.

Shape letters: P prompts, B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.errors import DataError, NonFiniteError
from etude.policies.language.decoder import Decoder
from etude.policies.language.head import wide
from etude.policies.language.sampling import Completion, FinishReason, Sampling, uniforms

COMPACT_AT = 7 / 8
"""The batch is compacted when no more than this share of its rows is unfinished: copying the cache is not free."""


@dataclass(slots=True)
class GenerationStats:
    """What a call of `generate` computed, for those who ask where the time goes."""

    prompt_tokens: int = 0
    """Tokens of prompts computed."""
    new_tokens: int = 0
    """Tokens returned."""
    row_steps: int = 0
    """Rows times steps computed; what exceeds `new_tokens` was spent on rows already finished."""


@dataclass(slots=True)
class _Row:
    """One completion in the making."""

    place: tuple[int, int]
    """Number of the prompt, number of the completion."""
    prompt: int
    """Number among the distinct prompts of this batch."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    text: str | None = None
    """What was said before a stop text, once one has come."""


class Generator:
    """Completes prompts with a decoder; knows tokens, and text only to find stops and to report."""

    def __init__(
        self,
        make_decoder: Callable[[], Decoder],
        tokenizer: Any,
        end_tokens: Sequence[int],
        *,
        pad_token: int,
        context: int,
        device: torch.device,
        max_rows: int,
    ) -> None:
        self._make_decoder = make_decoder
        self._tokenizer = tokenizer
        self._end_tokens = tuple(end_tokens)
        self._pad_token, self._context, self._device, self._max_rows = pad_token, context, device, max_rows

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, keys: Sequence[int], stats: GenerationStats
    ) -> list[list[Completion]]:
        """Return `n` completions of every prompt, in order."""
        self._refuse(prompts, sampling, n, keys)
        places = [(prompt, index) for prompt in range(len(prompts)) for index in range(n)]
        found: list[list[Completion]] = [[] for _ in prompts]
        for start in range(0, len(places), self._max_rows):
            part = places[start : start + self._max_rows]
            for (prompt, _), completion in zip(
                part, self._run_batch(part, prompts, sampling, keys, stats), strict=True
            ):
                found[prompt].append(completion)
        stats.new_tokens += sum(len(one.tokens) for group in found for one in group)
        return found

    def _refuse(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, keys: Sequence[int]) -> None:
        if n < 1:
            raise DataError(f"generate needs at least one completion per prompt, got n={n}")
        if len(keys) != len(prompts):
            raise DataError(f"generate needs one key per prompt, got {len(keys)} keys for {len(prompts)} prompts")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise DataError(f"prompt {number} has no tokens; begin it with at least one")
            if len(prompt) + sampling.max_new_tokens > self._context:
                raise DataError(
                    f"prompt {number} has {len(prompt)} tokens, which with max_new_tokens={sampling.max_new_tokens} "
                    f"exceeds the model's context of {self._context}"
                )

    def _run_batch(
        self,
        places: Sequence[tuple[int, int]],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        keys: Sequence[int],
        stats: GenerationStats,
    ) -> list[Completion]:
        distinct: dict[tuple[int, ...], int] = {}
        rows = [_Row(place, distinct.setdefault(tuple(prompts[place[0]]), len(distinct))) for place in places]
        draws = self._draws([row.place for row in rows], keys, sampling)
        decoder = self._make_decoder()
        logits = decoder.prefill(
            self._padded(list(distinct)), [len(prompt) for prompt in distinct], sampling.max_new_tokens
        )
        stats.prompt_tokens += sum(map(len, distinct))
        owners = torch.tensor([row.prompt for row in rows], device=self._device)
        if len(distinct) != len(rows):
            decoder.expand(owners)
            logits = logits[owners]
        active = list(range(len(rows)))
        shows_special = bool(sampling.stop) and self._name_special_tokens(sampling.stop)
        end_tokens = {*(self._end_tokens if sampling.ends else ()), *sampling.stop_tokens}
        for step in range(sampling.max_new_tokens):
            tokens_B, logprobs_B = choose(logits, None if draws is None else draws[active, step], sampling)
            for number, token, logprob in zip(active, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                row = rows[number]
                if row.finish is None:
                    if logprob != logprob:
                        raise NonFiniteError("the model's logits are not numbers (NaN); its weights are broken")
                    row.tokens.append(token)
                    row.logprobs.append(logprob)
                    self._notice_end(row, token in end_tokens, sampling, shows_special)
            unfinished = [at for at, number in enumerate(active) if rows[number].finish is None]
            if not unfinished:
                break
            if len(unfinished) <= COMPACT_AT * len(active):
                kept = torch.tensor(unfinished, device=self._device)
                decoder.keep(kept)
                tokens_B, active = tokens_B[kept], [active[at] for at in unfinished]
            logits = decoder.step(tokens_B)
            stats.row_steps += len(active)
        return [self._completion(row) for row in rows]

    def _draws(self, places: Sequence[tuple[int, int]], keys: Sequence[int], sampling: Sampling) -> np.ndarray | None:
        if sampling.is_greedy:
            return None
        owners, indices = [keys[prompt] for prompt, _ in places], [index for _, index in places]
        return uniforms(sampling.seed, owners, indices, sampling.max_new_tokens)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, prompts))
        lines = [[self._pad_token] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        return torch.tensor(lines, device=self._device)

    def _notice_end(self, row: _Row, is_end: bool, sampling: Sampling, shows_special: bool) -> None:
        if is_end:
            row.finish = "stop"
            return
        if sampling.stop:
            row.text = self._before_stop(row.tokens, sampling.stop, shows_special)
            if row.text is not None:
                row.finish = "stop"
                return
        if len(row.tokens) == sampling.max_new_tokens:
            row.finish = "length"

    def _before_stop(self, tokens: list[int], stops: Sequence[str], shows_special: bool) -> str | None:
        """Return the text before a stop, None without one; only the tail, which holds any new one, is looked at first.

        Where a stop names a special token, special tokens are looked at as well; the text is without them all the same.
        """
        # A character takes at most four bytes, and a token holds at least one byte.
        tail = self._decode(tokens[-4 * max(map(len, stops)) - 4 :], shows_special)
        if not any(stop in tail for stop in stops):
            return None
        text = self._decode(tokens, shows_special)
        at = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        if at is None or not shows_special:
            return None if at is None else text[:at]
        whole = next(n for n in range(len(tokens), -1, -1) if len(self._decode(tokens[:n], True)) <= at)
        return self._decode(tokens[:whole]) + text[len(self._decode(tokens[:whole], True)) : at]

    def _completion(self, row: _Row) -> Completion:
        text = self._decode(row.tokens) if row.text is None else row.text
        return Completion(row.tokens, row.logprobs, text, row.finish or "length")

    def _name_special_tokens(self, stops: Sequence[str]) -> bool:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        special = {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        return any(token in stop for token in special for stop in stops)

    def _decode(self, tokens: list[int], with_special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not with_special)
        return text


def choose(logits_BV: Tensor, draws_B: np.ndarray | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw a token per row with one number in [0, 1) each (none: the likeliest); return it and its log-probability.

    The number is looked up in the cumulative distribution, in the order of the vocabulary, in float32 at least (a
    sum in bfloat16 stops at 256): that knows a probability to about 1e-7, and never draws a token that has none.
    """
    logits_BV = logits_BV.to(wide(logits_BV.dtype))
    scaled = logits_BV.div_(sampling.scale) if sampling.scale != 1.0 else logits_BV
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    norms = top + weights.sum(-1, keepdim=True).log_()
    if draws_B is None:
        tokens = scaled.argmax(-1, keepdim=True)
    else:
        sums = _narrow(weights, sampling).cumsum(-1)
        total = sums[:, -1:]
        at = (torch.from_numpy(draws_B).to(sums.device)[:, None] * total).to(sums.dtype)
        # Below the total even where the product is rounded up to it, so that no impossible token follows.
        at = torch.minimum(at, torch.nextafter(total, total.new_zeros(())))
        tokens = torch.searchsorted(sums, at, right=True).clamp_(max=scaled.shape[-1] - 1)
    return tokens.squeeze(1), (scaled.gather(1, tokens) - norms).squeeze(1)


def _narrow(weights_BV: Tensor, sampling: Sampling) -> Tensor:
    """Rule out all but the likeliest tokens, by number and then by probability, as `top_k` and `top_p` ask."""
    if 0 < sampling.top_k < weights_BV.shape[-1]:
        least = weights_BV.topk(sampling.top_k, -1).values[:, -1:]
        weights_BV = weights_BV.masked_fill(weights_BV < least, 0.0)
    if sampling.top_p < 1:
        ordered, order = weights_BV.sort(dim=-1, descending=True, stable=True)
        sums = ordered.cumsum(-1)
        drop = torch.zeros_like(weights_BV, dtype=torch.bool)
        drop.scatter_(1, order, sums - ordered >= sampling.top_p * sums[:, -1:])
        weights_BV = weights_BV.masked_fill(drop, 0.0)
    return weights_BV
