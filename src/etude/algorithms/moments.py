"""Mean and variance of numbers that several ranks hold: each rank counts its own, and the counts merge.

Whoever normalises over a whole batch takes a `Gather`, so that the same batch gives the same numbers however many ranks
share it, and so that no formula has to know how ranks speak with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Any], list[Any]]
"""From plain values of this rank to those of every rank, in the order of ranks; all ranks must call together."""


def alone(value: Any) -> list[Any]:
    """Gather where there is one rank."""
    return [value]


@dataclass(frozen=True, slots=True)
class Moments:
    """How many numbers there were, their mean, and the sum of their squared distances from it."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Count the values where the mask is not 0, in float64; equal values have exactly their value as mean."""
        with torch.no_grad():
            kept = (values if mask is None else values[(mask != 0).expand_as(values)]).double().flatten()
            if not kept.numel():
                return cls()
            centred = kept - kept[0]  # differences from a member: equal values leave no rounding error behind
            shift = centred.mean()
            squares = (centred - shift).square().sum()
            return cls(float(kept.numel()), float(kept[0] + shift), float(squares))

    @classmethod
    def merged(cls, parts: Iterable[Moments]) -> Moments:
        """Return the moments of all numbers together."""
        filled = [part for part in parts if part.count]
        if not filled:
            return cls()
        count, first = math.fsum(part.count for part in filled), filled[0].mean
        mean = first + math.fsum(part.count * (part.mean - first) for part in filled) / count
        return cls(count, mean, math.fsum(part.squares + part.count * (part.mean - mean) ** 2 for part in filled))

    def over(self, gather: Gather) -> Moments:
        """Return the moments over all ranks."""
        return Moments.merged(Moments(*found) for found in gather([self.count, self.mean, self.squares]))

    @property
    def variance(self) -> float:
        """The population variance; 0 of nothing."""
        return self.squares / self.count if self.count else 0.0
