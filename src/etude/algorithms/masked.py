"""Sums and means over the entries that count; what is masked may be anything, NaN included.

Numbers of less than float32 are summed, and come back, as float32: in bfloat16 a sum stops growing at 256 ones.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from etude.algorithms.moments import Gather, Moments, alone


def precise(values: Tensor) -> Tensor:
    """Return values of less than float32 as float32, and others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the values where the mask is not 0, in float32 at least."""
    kept = torch.where(mask != 0, precise(values), 0)
    return kept.sum() if axis is None else kept.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the values where the mask is not 0; 0 where nothing counts."""
    counted = (mask != 0).expand_as(values)
    count = counted.sum() if axis is None else counted.sum(axis)
    return masked_sum(values, counted, axis) / count.clamp(min=1)


def predicted(mask_BT: Tensor, attention_BT: Tensor | None) -> Tensor:
    """Return a mask without the first token of each row: nothing comes before it that could predict it."""
    real_BT = torch.ones_like(mask_BT) if attention_BT is None else attention_BT
    return torch.where((real_BT != 0).cumsum(1) > 1, mask_BT, 0)


def masked_whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, gather: Gather = alone
) -> Tensor:
    """Return (v - mean) / sqrt(variance + eps) over what counts (population variance), and 0 elsewhere.

    Equal values give exactly 0. `shift_mean=False` scales only. With `gather`, mean and variance are those of all
    ranks; they are constants to autograd.
    """
    counted = (mask != 0).expand_as(values)
    whole = Moments.of(values, counted).over(gather)
    centred = values.double() - (whole.mean if shift_mean else 0.0)
    scale = math.sqrt(whole.variance + eps)  # 0 only with eps 0 and equal values, whose distance from the mean is 0
    return torch.where(counted, centred / (scale or 1.0), 0).to(precise(values).dtype)
