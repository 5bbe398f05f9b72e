"""A sharded policy built without ever being whole: each parameter is made alone, and a rank keeps its part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from etude.errors import EtudeError
from etude.loop.deferred import CannotDefer, Deferral, Ref, finish
from etude.loop.sharding import as_shard, own_span

log = logging.getLogger("etude")


class Waiting:
    """Parameters of a policy that are on the meta device, and how they are made."""

    def __init__(self, deferral: Deferral, refs: dict[str, Ref]) -> None:
        self._deferral, self._refs = deferral, refs

    @torch.no_grad()
    def fill(self, policy: nn.Module, device: torch.device) -> None:
        """Give a policy that has been sharded its weights, one parameter at a time."""
        made: dict[int, nn.Parameter] = {}
        for name, parameter in list(policy.named_parameters()):
            if name in self._refs:
                made[id(parameter)] = self._make(self._refs[name], parameter, device)
        for module in policy.modules():
            for leaf, held in module._parameters.items():
                if held is not None and id(held) in made:  # FSDP takes note of it when training starts
                    module._parameters[leaf] = made[id(held)]

    def _make(self, ref: Ref, parameter: Any, device: torch.device) -> nn.Parameter:
        assert isinstance(parameter, DTensor)
        dim, start, stop = own_span(parameter)
        part = self._deferral.make(ref).narrow(dim, start, stop - start)
        own = torch.empty(part.shape, dtype=parameter.dtype, device=device).copy_(part)
        return nn.Parameter(as_shard(own, parameter), requires_grad=parameter.requires_grad)


def build(policy: nn.Module, make: Callable[[], None], *, says: bool) -> Waiting | None:
    """Have a policy build itself without its large parameters; if it cannot, whole.

    Args:
        policy: What is built.
        make: Builds it, from seeding the generators on; called again if the first time comes to nothing.
        says: Whether to say that it was built whole, and why.
    """
    before = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(policy).items()}
    try:
        deferral = Deferral()
        with deferral:
            make()
        return Waiting(deferral, finish(policy, deferral))
    except Exception as error:  # noqa: BLE001 - whatever it is, it does not happen, or happens again, with all weights
        why = error
    vars(policy).clear()
    vars(policy).update(before)
    make()
    if says and not isinstance(why, EtudeError):
        reason = str(why) if isinstance(why, CannotDefer) else f"{type(why).__name__}: {str(why).splitlines()[0]}"
        log.warning(
            "%s is built whole on every rank before it is sharded: without its weights it cannot be (%s)",
            type(policy).__name__, reason,
        )  # fmt: skip
    return None
