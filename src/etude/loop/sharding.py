"""Whole tensors and the shards of them that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from etude.runs.shards import Piece, Stored


def full_tensor(value: Any) -> Any:
    """Return the whole of a sharded tensor (all ranks must call); anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_tensor(value: Any) -> Any:
    """Return this rank's shard of a tensor, or its piece of one to be saved; anything else as it is."""
    if isinstance(value, Piece):
        return value.tensor
    return value.to_local() if isinstance(value, DTensor) else value


def own_span(value: DTensor) -> tuple[int, int, int]:
    """Return the dimension that a tensor is cut along, and where this rank's part begins and ends.

    Ranks get equal parts, rounded up, as long as there is something: the last ones may get less, or nothing.
    """
    (placement,) = value.placements
    assert isinstance(placement, Shard)
    dim, mesh = placement.dim, value.device_mesh
    length, rank = value.shape[dim], mesh.get_local_rank()
    size = -(-length // mesh.size())
    return dim, min(rank * size, length), min((rank + 1) * size, length)


def piece_of(value: Any) -> Any:
    """Return this rank's piece of a sharded tensor, to be saved; a mapping with pieces; anything else as it is.

    A tensor that is sharded in another way than along one dimension over all ranks is gathered: all ranks must call.
    """
    if isinstance(value, Mapping):
        return {key: piece_of(item) for key, item in value.items()}
    if not isinstance(value, DTensor):
        return value
    if not is_cut(value):
        return value.full_tensor()
    return Piece(local_tensor(value.detach()), value.shape, own_span(value)[0])


def is_cut(value: Any) -> bool:
    """Tell whether a tensor is sharded along one dimension over one line of ranks, as FSDP2 does it."""
    return isinstance(value, DTensor) and len(value.placements) == 1 and type(value.placements[0]) is Shard


def shard_like(value: Any, reference: Any) -> Any:
    """Return this rank's shard of a whole tensor, cut as the reference is; anything else as it is.

    Of a tensor that is still on disk, no more is read.
    """
    fits = isinstance(reference, DTensor) and isinstance(value, Tensor | Stored) and value.shape == reference.shape
    if isinstance(value, Stored):
        if fits and is_cut(reference) and own_span(reference)[0] == value.dim:
            _, start, stop = own_span(reference)
            local = value.read(start, stop).to(reference.device)
            return as_shard(local, reference)
        value = value.read()
    if fits:
        return distribute_tensor(value.to(reference.device), reference.device_mesh, reference.placements)
    return value


def as_shard(local: Tensor, reference: DTensor) -> DTensor:
    """Return this rank's part of a tensor as one that is sharded as the reference is."""
    return DTensor.from_local(
        local, reference.device_mesh, reference.placements, run_check=False,
        shape=reference.shape, stride=reference.stride(),
    )  # fmt: skip
