"""Ratios of rounds that were measured in turns: their median, and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Spread:
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def shown(line: str, figure: float) -> float:
    """Print a figure in its line, and return it."""
    print(line.format(figure))
    return figure
