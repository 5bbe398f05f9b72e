"""What the micro-batches of one update sum to, whatever the split: one arithmetic for the loop and the doors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from etude.loop.distributed import Group

if TYPE_CHECKING:
    from etude.loop.step import Meter


class Account:
    """The losses and weights of one update's micro-batches: added one by one, read together, summed over the ranks.

    Losses are divided by a nominal weight before backward, and gradients corrected by the true one after it: the true
    weight is known only once every rank has seen all its micro-batches.

    Args:
        nominal: What losses are divided by, the same on every rank. None takes the first weight times `count`: with
            equal weights that divides a mean by the number of micro-batches, as a loop written by hand would.
        count: How many micro-batches there are.
    """

    def __init__(self, nominal: float | None, count: int) -> None:
        self.nominal, self.count = nominal, count
        self.total, self.weight = 0.0, 0.0
        """Of this rank, once read; of all, once summed."""
        self.losses: list[float] = []
        self.weights: list[float] = []
        self._added: list[tuple[Tensor, float, Any, Mapping[str, Any]]] = []

    def __len__(self) -> int:
        return len(self._added)

    def add(self, root: Tensor, factor: float, weight: Any, metrics: Mapping[str, Any]) -> float:
        """Add a micro-batch, as `split_loss` returns it; return what its root is to be multiplied by for backward."""
        self._added.append((root, factor, weight, metrics))
        if self.nominal is None:
            self.nominal = (float(weight) or 1.0) * self.count
        return factor / self.nominal

    def read(self, meter: Meter, loss_name: str | None = "loss") -> None:
        """Read the numbers, after the last backward pass: on an accelerator that waits for everything before it.

        Args:
            meter: Gets the metrics.
            loss_name: What the meter gets the loss as; None keeps it out.
        """
        for root, factor, weight, metrics in self._added:
            loss, count = root.item() * factor, float(weight)
            self.losses.append(loss)
            self.weights.append(count)
            self.weight += count
            if count:
                if loss_name is not None:
                    meter.add(loss_name, loss / count, count)
                for name, value in metrics.items():
                    meter.add(name, value, count)
        self.total = math.fsum(self.losses)

    def sum(self, group: Group, more: list[float]) -> list[float]:
        """Sum over all ranks, with `more` numbers, whose sums are returned."""
        self.total, self.weight, *rest = group.sum([self.total, self.weight, *more])
        return rest

    @property
    def is_finite(self) -> bool:
        """Whether no loss and no weight is NaN or infinity."""
        return math.isfinite(self.total + self.weight)

    @property
    def mean(self) -> float:
        """The mean loss; nought where nothing counts."""
        return self.total / self.weight if self.weight else 0.0

    def correction(self, world: int) -> float:
        """Return what gradients, averaged over the ranks, must be multiplied by; nought where nothing counts."""
        assert self.nominal is not None
        return self.nominal * world / self.weight if self.weight else 0.0

    def first_bad(self) -> tuple[int, str] | None:
        """Return which micro-batch of this rank is at fault, and what is wrong with it."""
        for number, (loss, weight) in enumerate(zip(self.losses, self.weights, strict=True)):
            for what, value in (("loss", loss), ("weight of the loss", weight)):
                if not math.isfinite(value):
                    return number, f"{what} is {value} in micro-batch {number}"
        return None
