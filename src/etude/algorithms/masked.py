"""Sums and means over the entries that count; what is masked may be anything, NaN included.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the values where the mask is not 0."""
    kept = torch.where(mask != 0, values, 0)
    return kept.sum() if axis is None else kept.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the values where the mask is not 0; 0 where nothing counts."""
    counted = (mask != 0).expand_as(values)
    count = counted.sum() if axis is None else counted.sum(axis)
    return masked_sum(values, counted, axis) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Return (v - mean) / sqrt(variance + eps) over what counts (population variance), and 0 elsewhere.

    Equal values give exactly 0. `shift_mean=False` scales only.
    """
    counted = (mask != 0).expand_as(values)
    if not bool(counted.any()):
        return torch.zeros_like(values)
    origin = values[counted].min()  # differences from a member: equal values leave no rounding error behind
    centred = torch.where(counted, values - origin, 0)
    mean = masked_mean(centred, counted)
    centred = torch.where(counted, centred - mean, 0)
    scale = torch.rsqrt(masked_mean(centred * centred, counted) + eps)
    return torch.where(counted, (centred if shift_mean else values) * scale, 0)
