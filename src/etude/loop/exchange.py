"""Gradients of several ranks under manual optimisation: averaged when a backward pass ends, as if one had made them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from etude.errors import RankError
from etude.loop import guard

if TYPE_CHECKING:
    from etude.loop.distributed import Group
    from etude.loop.optimizers import Optimization
    from etude.loop.watchdog import Pulse

BACKWARD, END = 1, 2
"""Where a rank may meet the others: after a backward pass, and at the end of the step; optimizers are counted on."""


class GradientExchange:
    """Averages gradients over ranks at the end of every backward pass, before anyone looks at them (to clip, say).

    Ranks may take different paths: a parameter that only some used counts as zero on the others, one that none used
    keeps no gradient, and a rank that goes without a backward pass joins those of the others. What must agree is
    which optimizers step, and in which order.
    """

    def __init__(
        self, group: Group, optimizations: Mapping[str, Optimization], names: Mapping[nn.Parameter, str], pulse: Pulse
    ) -> None:
        self.group, self.names, self.pulse = group, names, pulse
        self.optimizers = list(optimizations)
        self.params = list(dict.fromkeys(p for o in optimizations.values() for p in o.params if p.requires_grad))
        self.finding: str | None = None
        """What was not finite in this rank's own gradients, before they were averaged."""
        self._place = {parameter: index for index, parameter in enumerate(self.params)}
        self._touched: set[int] = set()
        self._averaged: dict[int, Tensor] = {}
        self._queued = False
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in self.params
        ]

    def close(self) -> None:
        """Let go of the parameters: a backward pass after training concerns no other rank."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, parameter: Tensor) -> None:
        self._touched.add(self._place[parameter])  # type: ignore[index]  # hooks sit on parameters
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._queued = False
        self._meet(BACKWARD)

    def before_step(self, name: str) -> None:
        """Meet the other ranks before an optimizer's step; average gradients that no backward pass has brought."""
        for index, parameter in enumerate(self.params):
            if parameter.grad is not None and self._averaged.get(index) is not parameter.grad:
                self._touched.add(index)
        self._meet(END + 1 + self.optimizers.index(name))

    def end_step(self, values: list[float]) -> list[float]:
        """Meet the other ranks after the step and return the sums of `values` over all of them."""
        self._touched.clear()
        totals = self._meet(END, values)
        self._averaged.clear()
        self.finding = None
        return totals

    def _meet(self, place: int, values: list[float] | None = None) -> list[float]:
        """Average what any rank has touched, until all ranks are at the same place; after a backward pass, once."""
        payload = values if values is not None else [0.0] * 5
        phase = self.pulse.phase
        self.pulse.enter("sync")
        while True:
            flags = [float(index in self._touched) for index in range(len(self.params))]
            here = [float(place), float(place * place), float(place == BACKWARD)]
            places, squares, backward, *rest = self.group.sum([*here, *payload, *flags])
            self._average([index for index, flag in enumerate(rest[len(payload) :]) if flag])
            agree = places * places == self.group.world * squares
            if agree or place == BACKWARD:
                self.pulse.enter(phase)
                return rest[: len(payload)]
            if not backward:
                self._disagree(place)

    def _average(self, indices: list[int]) -> None:
        if not indices:
            return
        chosen = [self.params[index] for index in indices]
        self.finding = self.finding or guard.check_gradients(self.names, chosen)
        with torch.no_grad():
            for parameter in chosen:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.group.average_([parameter.grad.detach() for parameter in chosen if parameter.grad is not None])
        self._averaged.update({i: p.grad for i, p in zip(indices, chosen, strict=True) if p.grad is not None})
        self._touched.clear()

    def _disagree(self, place: int) -> None:
        words: Any = self._words(place)
        where = [f"rank {rank} is {text}" for rank, text in enumerate(self.group.gather(words))]
        raise RankError(
            f"the ranks part ways in train_step: {', '.join(where)}; step the same optimizers in the same order on "
            "every rank (one whose parameters got no gradient on a rank is averaged over those that have one)"
        )

    def _words(self, place: int) -> str:
        return "at the end of the step" if place == END else f"about to step {self.optimizers[place - END - 1]!r}"
