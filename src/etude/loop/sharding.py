"""Whole tensors and the shards of them that a rank holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(value: Any) -> Any:
    """Return the whole of a sharded tensor (all ranks must call); anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's shard; a plain tensor as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def shard_like(value: Any, reference: Any) -> Any:
    """Return this rank's shard of a whole tensor, cut as the reference is; anything else as it is."""
    if isinstance(reference, DTensor) and isinstance(value, Tensor) and value.shape == reference.shape:
        return distribute_tensor(value.to(reference.device), reference.device_mesh, reference.placements)
    return value
