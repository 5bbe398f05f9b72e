"""Arithmetic of the forward pass, and the loss scale that keeps half precision from underflowing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class LossScale:
    """Dynamic loss scale for fp16: halved when gradients overflow, doubled after a quiet while; saved with the run."""

    def __init__(self, value: float = 65536.0, quiet_steps: int = 2000) -> None:
        self.value = value
        self.quiet_steps = quiet_steps
        self.since_change = 0

    def overflowed(self) -> bool:
        """Lower the scale; return False once it can go no lower, for then the numbers themselves are at fault."""
        self.value /= 2
        self.since_change = 0
        return self.value >= 1.0

    def held(self) -> None:
        """Note a step without overflow."""
        self.since_change += 1
        if self.since_change >= self.quiet_steps:
            self.value = min(self.value * 2, 2.0**24)
            self.since_change = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counter."""
        return {"value": self.value, "since_change": self.since_change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved scale."""
        self.value, self.since_change = float(state["value"]), int(state["since_change"])


class Precision:
    """Which autocast a forward pass runs under, and the loss scale if it needs one."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name == "auto":
            name = "bf16" if device.type == "cuda" else "float32"
        self.name = name
        self.device = device
        self.scale = LossScale() if name == "fp16" else None
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)

    def convert(self, policy: nn.Module) -> None:
        """Move the policy to its device and, for float64, to that type."""
        if any(tensor.is_meta for tensor in policy.parameters()):  # these get memory later, where it belongs
            policy._apply(  # type: ignore[no-untyped-call]
                lambda tensor: tensor if tensor.is_meta else tensor.to(self.device)
            )
        else:
            policy.to(self.device)
        if self.name == "float64":
            policy.double()

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    @property
    def casts(self) -> bool:
        """Whether the forward pass needs a context at all; lets the hot path skip it."""
        return self._dtype is not None

    def cast_batch(self, batch: Any) -> Any:
        """Under float64, cast the floating tensors of a batch too."""
        return cast_floating(batch, torch.float64)


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with all its floating tensors in one type."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: cast_floating(value, dtype) for key, value in batch.items()}
    if isinstance(batch, list | tuple) and type(batch) in (list, tuple):
        return type(batch)(cast_floating(value, dtype) for value in batch)
    return batch
