"""An exponential moving average of the weights, kept beside them and lent to evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from etude.loop.sharding import local_tensor, shard_like


class EMA:
    """Shadow copies of the trainable parameters; buffers are not averaged."""

    def __init__(self, policy: nn.Module, decay: float) -> None:
        self.decay = decay
        self.params = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.shadow = {name: p.detach().clone() for name, p in self.params.items()}

    def update(self, step: int) -> None:
        """Move the average toward the weights; the first steps follow them closely."""
        decay = min(self.decay, (1 + step) / (10 + step))
        shadows = [local_tensor(shadow) for shadow in self.shadow.values()]
        torch._foreach_lerp_(shadows, [local_tensor(p.detach()) for p in self.params.values()], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run a block with the averaged weights in place of the trained ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, param in self.params.items():
            shadow = self.shadow[name]
            held = param.detach().clone()
            param.detach().copy_(shadow)
            shadow.copy_(held)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights, as far as this rank holds them."""
        return dict(self.shadow)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up saved averages."""
        for name, shadow in self.shadow.items():
            shadow.copy_(shard_like(state[name], shadow))
