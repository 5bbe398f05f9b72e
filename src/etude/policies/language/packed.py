"""Attention over packed text: all prompts and completions of a batch in one line, each completion seeing its prompt.

In a line that several rows share, every token is compared with every other and most of that is masked away: with eight
completions of 64 tokens attention was a seventh of the training time. Here prompts and completions are taken apart for
the attention alone, so that nothing is compared in vain; the layers between see one line without padding.

Shape letters: T packed tokens, G prompts, P tokens of the longest, S completions, C tokens of the longest, K = P + C,
D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from etude.extras import import_extra

NAME = "etude_packed"
_current: ContextVar[Packing] = ContextVar("packing")


@dataclass(frozen=True, slots=True)
class Packing:
    """Which packed tokens meet in attention."""

    prompt_GP: Tensor
    """The tokens of each prompt, padded with its first."""
    query_SC: Tensor
    """The tokens of each completion, padded with its first."""
    key_SK: Tensor
    """What they may see: their prompt and themselves."""
    sees_SCK: Tensor
    """What of that they do see."""
    place_T: Tensor
    """Where each packed token is among all of `prompt_GP` and then all of `query_SC`."""
    _biases: dict[Any, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, prompts: Sequence[np.ndarray], owners: Sequence[int], rests: Sequence[np.ndarray], device: Any
    ) -> Packing:
        """Plan the attention of completions (`rests`, the numbers of their tokens), each to its owner's prompt."""
        sizes = np.array([len(prompts[owner]) for owner in owners])
        lengths = np.array([len(rest) for rest in rests])
        prompt, query = _padded(prompts), _padded(rests)
        key = np.concatenate((prompt[list(owners)], query), 1)
        columns, steps = np.arange(prompt.shape[1]), np.arange(query.shape[1])
        before = np.broadcast_to((columns < sizes[:, None])[:, None], (*query.shape, len(columns)))
        own = np.broadcast_to(steps[None, :] <= steps[:, None], (*query.shape, len(steps)))
        place = np.zeros(sum(map(len, prompts)) + int(lengths.sum()), dtype=np.int64)
        for offset, width, tokens in ((0, prompt.shape[1], prompts), (prompt.size, query.shape[1], rests)):
            for number, each in enumerate(tokens):
                place[each] = offset + number * width + np.arange(len(each))
        sees = np.concatenate((before, own), 2)
        planned = (prompt, query, key, sees, place)
        tensors = [torch.from_numpy(np.ascontiguousarray(found)).to(device) for found in planned]
        return cls(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4])

    def bias(self, copies: int, dtype: torch.dtype) -> Tensor:
        """Return 0 where a token is seen and -inf elsewhere, (S, 1, copies * C, K); made once for all layers."""
        found = self._biases.get((copies, dtype))
        if found is None:
            found = torch.zeros(self.sees_SCK.shape, dtype=dtype, device=self.sees_SCK.device)
            found = found.masked_fill_(~self.sees_SCK, -torch.inf).repeat(1, copies, 1)[:, None]
            self._biases[copies, dtype] = found
        return found


@contextmanager
def attending(config: Any, packing: Packing | None) -> Iterator[None]:
    """Let a model attend as packed text needs it, for as long as the context lasts."""
    if packing is None:
        yield
        return
    import_extra("transformers", "llm").AttentionInterface.register(NAME, attend)
    kept, token = config._attn_implementation, _current.set(packing)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = kept
        _current.reset(token)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks its attention functions to: (1, heads, T, D) to (1, T, heads, D)."""
    packing = _current.get()
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    heads, keys, width = q.shape[1], k.shape[1], q.shape[2]
    group, shape = heads // keys, packing.query_SC.shape
    attention: Any = partial(functional.scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    prompts = (_picked(each, packing.prompt_GP).transpose(1, 2) for each in (q, k, v))
    first = attention(*prompts, is_causal=True, enable_gqa=group > 1)
    # Heads that share their keys stand behind each other as further queries: no key is copied for them.
    queries = _picked(q, packing.query_SC).view(*shape, keys, group, width).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(shape[0], keys, group * shape[1], width)
    seen = (_picked(each, packing.key_SK).transpose(1, 2) for each in (k, v))
    rest = attention(queries, *seen, attn_mask=packing.bias(group, q.dtype))
    rest = rest.reshape(shape[0], keys, group, shape[1], width).permute(0, 3, 1, 2, 4)
    both = torch.cat((first.transpose(1, 2).reshape(-1, heads * width), rest.reshape(-1, heads * width)))
    return both.index_select(0, packing.place_T).view(1, -1, heads, width), None


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """Return the values (T, heads, D) of some tokens, by rows."""
    flat = values.reshape(values.shape[0], -1)
    return flat.index_select(0, index.reshape(-1)).view(*index.shape, *values.shape[1:])


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    width = max(map(len, rows))
    found = np.stack([np.concatenate((row, np.full(width - len(row), row[0]))) for row in rows])
    return found.astype(np.int64)
