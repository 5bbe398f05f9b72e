"""Tokens as the OpenAI protocol shows them: text as it becomes certain, and log-probabilities in both of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.service.server.live import Told


class TextStream:
    """The text of a completion while it is drawn: what may yet change, or belong to a stop, is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._tokens: list[int] = []
        self._said = 0

    def add(self, token: int) -> str:
        """Take a token and return the text that is certain now and was not before."""
        self._tokens.append(token)
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        # A character of several tokens is there when its last one is.
        sure = len(text.rstrip("\ufffd")) - self._held
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        piece = text[self._said : min([sure, *found])]
        self._said += len(piece)
        return piece

    def rest(self, text: str) -> str:
        """Return what of the whole text has not been said."""
        return text[self._said :]


def text_logprobs(tokenizer: Any, told: Sequence[Told], top: int, said_before: int) -> dict[str, Any]:
    """Return log-probabilities as `/completions` shows them."""
    tokens = [_shown(tokenizer, token) for token, _, _ in told]
    offsets, at = [], said_before
    for token in tokens:
        offsets.append(at)
        at += len(token)
    likeliest = [{_shown(tokenizer, other): value for other, value in others} for _, _, others in told]
    return {
        "tokens": tokens, "token_logprobs": [value for _, value, _ in told], "text_offset": offsets,
        "top_logprobs": likeliest if top else None,
    }  # fmt: skip


def chat_logprobs(tokenizer: Any, told: Sequence[Told]) -> dict[str, Any]:
    """Return log-probabilities as `/chat/completions` shows them, each with the `id` of its token."""
    content = [
        {**_entry(tokenizer, token, value), "top_logprobs": [_entry(tokenizer, *other) for other in others]}
        for token, value, others in told
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Any, token: int, value: float) -> dict[str, Any]:
    text = _shown(tokenizer, token)
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "id": token}


def _shown(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token])
    return text
