"""Batches of text for the tests of language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from etude.policies.language import Completion, LanguageModel

Pair = tuple[list[int], list[int]]
SMALL = {"hidden_size": 32, "heads": 4, "key_heads": 2, "intermediate_size": 64}


def pairs_of(policy: LanguageModel, prompts: Sequence[str], groups: Sequence[Sequence[Completion]]) -> list[Pair]:
    return [(policy.encode(text), one.tokens) for text, group in zip(prompts, groups, strict=True) for one in group]


def make_batch(pairs: Sequence[Pair], pad: int = 0, *, extra: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Lay out prompts and completions as rows, padded to the longest and `extra` more."""
    width = max(len(prompt) + len(tokens) for prompt, tokens in pairs) + extra
    ids = torch.full((len(pairs), width), pad)
    attention, counted = torch.zeros_like(ids), torch.zeros(len(pairs), width)
    for row, (prompt, tokens) in enumerate(pairs):
        length = len(prompt) + len(tokens)
        start = width - length if left else 0
        ids[row, start : start + length] = torch.tensor([*prompt, *tokens])
        attention[row, start : start + length] = 1
        counted[row, start + len(prompt) : start + length] = 1
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": counted}


def plain_log_probs(model: Any, batch: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    """The textbook way: a forward pass row by row without padding, log_softmax over everything, zero where masked."""
    ids, attention = batch["input_ids"], batch["attention_mask"]
    out = torch.zeros(ids.shape, dtype=next(model.parameters()).dtype)
    rows = []
    for row, (line, real) in enumerate(zip(ids, attention.bool(), strict=True)):
        at = real.nonzero().squeeze(1)
        logs = torch.log_softmax(model(line[at][None]).logits[0, :-1] / temperature, -1)
        found = torch.zeros_like(out[row])
        rows.append(found.index_put((at[1:],), logs.gather(1, line[at][1:, None]).squeeze(1)))
    return torch.stack(rows) * batch["loss_mask"]
