"""How losses by token become one Loss: a sum and a weight, so that splits of a batch cannot change the update.

Shape letters: B rows, T tokens. The engine divides the totals of all micro-batches and ranks by all their weights:

| how | total | weight | each ... counts the same |
|---|---|---|---|
| token_mean | sum of all tokens | tokens | token |
| token_sum | sum of all tokens | rows | row, by its sum |
| sequence_mean | sum over rows of the row's mean | rows | row, by its mean |
| length_normalised | sum of all tokens / length | rows | token, at a rate that does not depend on lengths (Dr. GRPO) |

Rows without a token that counts weigh nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.types import Loss

Aggregation = Literal["token_mean", "token_sum", "sequence_mean", "length_normalised"]


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    how: Aggregation = "token_mean",
    *,
    length: int | None = None,
    metrics: Mapping[str, Tensor] | None = None,
) -> Loss:
    """Return losses by token as a `Loss`; metrics by token (B, T) become means over tokens, or over means of rows.

    Sums and weights are float32 at least: bfloat16 counts 4,004 tokens as 4,000.
    `length` is the constant that length_normalised divides by; None takes the width of the batch, which is constant
    only if every batch is padded to one width.
    """
    counts_BT = mask_BT != 0
    total = _total(loss_BT, counts_BT, how, length)
    weight = (counts_BT.sum() if how == "token_mean" else counts_BT.any(1).sum()).to(total.dtype)
    with torch.no_grad():
        whole, kind = weight.clamp(min=1), how if how == "token_mean" else "sequence_mean"
        means = {name: _total(value, counts_BT, kind, None) / whole for name, value in (metrics or {}).items()}
    return Loss(total, weight, means)


def _total(values_BT: Tensor, counts_BT: Tensor, how: Aggregation, length: int | None) -> Tensor:
    kept_BT = torch.where(counts_BT, values_BT, 0.0).to(torch.promote_types(values_BT.dtype, torch.float32))
    if how in ("token_mean", "token_sum"):
        return kept_BT.sum()
    if how == "sequence_mean":
        return (kept_BT.sum(1) / counts_BT.sum(1).clamp(min=1)).sum()
    if how == "length_normalised":
        constant = counts_BT.shape[1] if length is None else length
        return kept_BT.sum() / max(constant, 1)
    raise ConfigError(
        f"unknown aggregation {how!r}; choose from token_mean, token_sum, sequence_mean, length_normalised"
    )
