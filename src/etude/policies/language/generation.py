"""Complete prompts: each distinct prompt computed once, rows that are finished leave the batch, others may join it.

Rows differ from the same rows in another batch only by the last bits of their logits (matrix products of another
shape round differently); the same calls give the same completions, bit for bit.

Shape letters: P prompts, B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


@dataclass(frozen=True, slots=True)
class WantedText:
    """One completion that is asked for."""

    prompt: Sequence[int]
    key: int
    """Names its random stream, together with `index`."""
    index: int
    max_new_tokens: int
    place: Any
    """What it is known by to who asks."""

    @property
    def span(self) -> int:
        """Tokens of prompt and completion at most."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(slots=True)
class _Row:
    """One completion in the making."""

    wanted: WantedText
    draws: np.ndarray | None
    """Numbers that its tokens are drawn with."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    text: str | None = None
    """What was said before a stop text, once one has come."""


class TokenListener(Protocol):
    """Hears of every token as soon as it is drawn."""

    top: int
    """How many of the likeliest tokens to tell of at each place."""

    def hear(self, prompt: int, index: int, token: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Take a token of completion `index` of a prompt; return whether it is to go on."""
        ...


class TextSource(Protocol):
    """Asks for completions while others are being drawn, and is told what comes of them."""

    top: int
    """How many of the likeliest tokens to tell of at each place."""

    def take(self, rows: int) -> Sequence[WantedText]:
        """Return what is to be drawn from now on, best so many at most; asked before every token."""
        ...

    def hear(self, place: Any, token: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Take a token; return whether its completion is to go on."""
        ...

    def finish(self, place: Any, completion: Completion) -> None:
        """Take a completion that has ended."""
        ...


class _Listed:
    """A source of what is known beforehand."""

    def __init__(self, wanted: list[WantedText], listener: TokenListener | None) -> None:
        self._wanted, self._listener = wanted, listener
        self.top = 0 if listener is None else listener.top
        self.found: dict[tuple[int, int], Completion] = {}

    def take(self, rows: int) -> Sequence[WantedText]:
        wanted, self._wanted = self._wanted, []
        return wanted

    def hear(self, place: Any, token: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        prompt, index = place
        return self._listener is None or self._listener.hear(prompt, index, token, logprob, top)

    def finish(self, place: Any, completion: Completion) -> None:
        self.found[place] = completion


class Generator:
    """Completes prompts with a decoder; knows tokens, and text only to find stops and to report."""

    def __init__(
        self,
        make_decoder: Callable[[int, int], Decoder],
        tokenizer: Any,
        end_tokens: Sequence[int],
        most: tuple[int, int | None],
        *,
        pad_token: int,
        context: int,
        device: torch.device,
    ) -> None:
        self._make_decoder = make_decoder
        self._tokenizer = tokenizer
        self._end_tokens = tuple(end_tokens)
        self._pad_token, self._context, self._device = pad_token, context, device
        self._max_rows, self._max_places = most

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        keys: Sequence[int],
        stats: GenerationStats,
        listener: TokenListener | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions of every prompt, in order."""
        self._refuse(prompts, sampling, n, keys)
        wanted = [
            WantedText(prompt, keys[number], index, sampling.max_new_tokens, (number, index))
            for number, prompt in enumerate(prompts)
            for index in range(n)
        ]
        found: dict[tuple[int, int], Completion] = {}
        for start in range(0, len(wanted), self._max_rows):
            source = _Listed(wanted[start : start + self._max_rows], listener)
            self.serve(source, sampling, stats)
            found |= source.found
        return [[found[number, index] for index in range(n)] for number in range(len(prompts))]

    @torch.inference_mode()
    def serve(self, source: TextSource, sampling: Sampling, stats: GenerationStats) -> None:
        """Draw what a source asks for, until all is drawn and it asks for nothing more.

        Completions that are asked for while others are drawn join them, where the decoder can; each has a length of
        its own, and all have the rest of `sampling`.
        """
        shows_special = bool(sampling.stop) and self._name_special_tokens(sampling.stop)
        end_tokens = {*(self._end_tokens if sampling.ends else ()), *sampling.stop_tokens}
        batch = _Drawing(self._make_decoder, self._pad_token, self._device, stats)
        backlog: list[WantedText] = []
        while True:
            going = len(batch.unfinished)
            room = self._max_rows - going if batch.can_join or not going else 0
            backlog += source.take(max(0, room - len(backlog)))
            if not backlog and not going:
                return
            fitting = min(room, self._fitting(backlog, batch))
            new, backlog = backlog[:fitting], backlog[fitting:]
            logits = batch.go_on(self._rows(new, sampling))
            told = likeliest_of(logits, sampling.scale, source.top) if source.top else None
            for at, (row, token, logprob) in enumerate(batch.draw(logits, sampling)):
                if row.finish is None:
                    if logprob != logprob:
                        raise NonFiniteError("the model's logits are not numbers (NaN); its weights are broken")
                    row.tokens.append(token)
                    row.logprobs.append(logprob)
                    self._notice_end(row, token in end_tokens, sampling, shows_special)
                    if _tell(source, row, [] if told is None else told[at]):
                        stats.new_tokens += len(row.tokens)
                        source.finish(row.wanted.place, self._completion(row))

    def _fitting(self, wanted: Sequence[WantedText], batch: _Drawing) -> int:
        """Return how many more completions there are places for beside those that are drawn; one if none is."""
        if self._max_places is None:
            return len(wanted)
        going = batch.spans
        rows, widest = len(going), max(going, default=0)
        for number, one in enumerate(wanted):
            widest = max(widest, one.span)
            if (rows + number + 1) * widest > self._max_places and rows + number:
                return number
        return len(wanted)

    def _rows(self, wanted: Sequence[WantedText], sampling: Sampling) -> list[_Row]:
        if not wanted or sampling.is_greedy:
            return [_Row(one, None) for one in wanted]
        keys, indices = [one.key for one in wanted], [one.index for one in wanted]
        draws = uniforms(sampling.seed, keys, indices, max(one.max_new_tokens for one in wanted))
        return [_Row(one, numbers) for one, numbers in zip(wanted, draws, strict=True)]

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

    def _notice_end(self, row: _Row, is_end: bool, sampling: Sampling, shows_special: bool) -> None:
        if is_end:
            row.finish = "stop"
            return
        if sampling.stop:
            row.text = self._before_stop(row.tokens, sampling.stop, shows_special)
            if row.text is not None:
                row.finish = "stop"
                return
        if len(row.tokens) == row.wanted.max_new_tokens:
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


def _tell(source: TextSource, row: _Row, top: list[tuple[int, float]]) -> bool:
    """Tell of a row's last token; one that is not wanted any longer ends here. Return whether it has ended."""
    goes_on = source.hear(row.wanted.place, row.tokens[-1], row.logprobs[-1], top)
    if not goes_on and row.finish is None:
        row.finish = "length"
    return row.finish is not None


class _Drawing:
    """Rows that are drawn side by side, and the decoder that has them."""

    def __init__(
        self, make_decoder: Callable[[int, int], Decoder], pad_token: int, device: torch.device, stats: GenerationStats
    ) -> None:
        self._make_decoder, self._pad_token, self._device, self._stats = make_decoder, pad_token, device, stats
        self._rows: list[_Row] = []
        """Those that the decoder has: finished ones stay until it pays to leave them out."""
        self._decoder: Decoder | None = None
        self._tokens: Tensor

    @property
    def can_join(self) -> bool:
        """Whether rows can be taken in while others are unfinished."""
        return self._decoder is None or self._decoder.can_join

    @property
    def unfinished(self) -> list[int]:
        """Numbers of the rows that go on."""
        return [at for at, row in enumerate(self._rows) if row.finish is None]

    @property
    def spans(self) -> list[int]:
        """Tokens at most of each row that goes on."""
        return [row.wanted.span for row in self._rows if row.finish is None]

    def go_on(self, new: list[_Row]) -> Tensor:
        """Take in new rows, and return the logits of the next token of every row."""
        unfinished, decoder = self.unfinished, self._decoder
        if decoder is None or not unfinished:
            self._rows = new
            self._decoder, logits = self._begin(new, len(new))
            return logits
        if len(unfinished) <= COMPACT_AT * len(self._rows) or (new and len(unfinished) < len(self._rows)):
            kept = torch.tensor(unfinished, device=self._device)
            decoder.keep(kept)
            self._tokens, self._rows = self._tokens[kept], [self._rows[at] for at in unfinished]
        logits = decoder.step(self._tokens)
        self._stats.row_steps += len(self._rows)
        if new:
            other, others = self._begin(new, len(self._rows) + len(new))
            self._rows += new
            decoder.join(other, max(row.wanted.max_new_tokens - len(row.tokens) for row in self._rows))
            logits = torch.cat((logits, others))
        return logits

    def draw(self, logits: Tensor, sampling: Sampling) -> Iterator[tuple[_Row, int, float]]:
        """Draw a token for every row."""
        draws = None
        if not sampling.is_greedy:
            # A finished row has no numbers left, and what is drawn for it is passed over.
            numbers = [0.0 if row.finish else row.draws[len(row.tokens)] for row in self._rows if row.draws is not None]
            draws = np.array(numbers)
        self._tokens, logprobs = choose(logits, draws, sampling)
        return zip(self._rows, self._tokens.tolist(), logprobs.tolist(), strict=True)

    def _begin(self, rows: list[_Row], in_all: int) -> tuple[Decoder, Tensor]:
        """Return a decoder that has read the prompts of rows, each distinct one once, and the logits that follow.

        They are going to be drawn side by side with others, so many in all.
        """
        distinct: dict[tuple[int, ...], int] = {}
        owners = [distinct.setdefault(tuple(row.wanted.prompt), len(distinct)) for row in rows]
        lengths = [len(prompt) for prompt in distinct]
        width = max(lengths)
        padded = [[self._pad_token] * (width - len(prompt)) + list(prompt) for prompt in distinct]
        room = max(row.wanted.max_new_tokens for row in rows)
        before = self._decoder
        decoder = self._make_decoder(room, in_all) if before is None else before.another(in_all)
        logits = decoder.prefill(torch.tensor(padded, device=self._device), lengths, room)
        self._stats.prompt_tokens += sum(lengths)
        if len(distinct) != len(rows):
            numbers = torch.tensor(owners, device=self._device)
            decoder.expand(numbers)
            logits = logits[numbers]
        return decoder, logits


def likeliest_of(logits_BV: Tensor, scale: float, most: int) -> list[list[tuple[int, float]]]:
    """Return, per row, the likeliest tokens and their log-probabilities under softmax(logits / scale)."""
    log_probs = (logits_BV.to(wide(logits_BV.dtype)) / scale).log_softmax(-1)
    values, tokens = log_probs.topk(min(most, logits_BV.shape[-1]), -1)
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]


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
