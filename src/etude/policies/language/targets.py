"""Log-probabilities of any tokens after each token of a text, not only of the one that follows.

Shape letters: R rows, W their width, N targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from etude.policies.language.layout import Layout

BATCH_TOKENS = 4096
"""Tokens, padding included, that are computed side by side."""


def target_batches(lengths: Sequence[int], most: int = BATCH_TOKENS) -> list[list[int]]:
    """Return which texts are computed together: neighbours in length, so that little is padding; always the same."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= most:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def target_log_probs(policy: Any, texts: Sequence[Sequence[int]], targets: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probabilities of the targets of each text, in the shape of the targets.

    Args:
        policy: A `LanguageModel`.
        texts: The tokens that are read.
        targets: For each text what may follow each token: (tokens) or (tokens, alternatives).
    """
    width = max(map(len, texts))
    tokens_RW = torch.zeros(len(texts), width, dtype=torch.int64)
    sources = []
    for row, (text, target) in enumerate(zip(texts, targets, strict=True)):
        tokens_RW[row, : len(text)] = torch.tensor(text)
        places = torch.arange(len(text)) + row * width
        sources.append(places.repeat_interleave(target.numel() // len(text)))
    device = policy.device
    layout = Layout(
        tokens_RW.to(device),
        torch.arange(width, device=device).expand(len(texts), width),
        None,  # causal, with padding last, which is seen by none
        torch.cat(sources).to(device),
        torch.cat([target.reshape(-1) for target in targets]).to(device),
        torch.zeros(0, dtype=torch.int64),
        (len(texts), width),
    )
    found = policy._compute(layout).log_probs.split([target.numel() for target in targets])
    return [each.view(target.shape) for each, target in zip(found, targets, strict=True)]
