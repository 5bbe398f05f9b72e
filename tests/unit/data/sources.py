"""Datasets and comparisons that the data tests share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.types.protocols import Data, Place


class Augmented:
    """Samples that carry their index and draws from all three global generators."""

    def __init__(self, length: int = 23) -> None:
        self.length = length
        self.touched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.touched.append(index)
        draws = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return {"index": torch.tensor(index), "draws": torch.tensor(draws, dtype=torch.float64)}


def flatten(value: Any) -> list[Tensor]:
    """List all tensors of nested micro-batches."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in flatten(item)] if isinstance(value, list | tuple) else []


def same(left: Any, right: Any) -> bool:
    """Compare all tensors bit for bit."""
    a, b = flatten(left), flatten(right)
    return len(a) == len(b) > 0 and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def taken(data: Data, steps: list[int], place: Place) -> list[Any]:
    """Open, take the steps, close."""
    data.open(place)
    try:
        return [data.take(step) for step in steps]
    finally:
        data.close()
