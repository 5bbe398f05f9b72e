"""The group of ranks that train together: who we are, sums over all, and plain values exchanged as JSON."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude import errors
from etude.errors import ConfigError, EtudeError

# Long enough for a slow rank to load its data; a rank that hangs is found by the watchdog long before.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


CPU = torch.device("cpu")
_CHANNELS: dict[int, Any] = {}
"""By the group of all ranks, the channel beside it."""


@dataclass(frozen=True)
class Group:
    """One rank's view of its group. Collectives happen here and nowhere else."""

    rank: int = 0
    world: int = 1
    device: torch.device = CPU
    channel: dist.ProcessGroup | None = None
    """What messages go through; None is the channel that training uses."""

    @classmethod
    def join(cls, device: str = "auto") -> Group:
        """Join the group that torchrun (or an engine) describes in the environment; alone without one."""
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else None)
        if world == 1:
            return cls(device=place)
        if not dist.is_initialized():
            backend = "nccl" if place.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
            # Kept until the process ends, not until `fit` does: sharded weights need the group to be read.
            atexit.register(_leave)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        return cls(dist.get_rank(), dist.get_world_size(), place)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all ranks, in float64."""
        if self.world == 1:
            return values
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(vector)
        return [float(value) for value in vector.tolist()]

    def average_(self, tensors: list[Tensor]) -> None:
        """Average tensors over all ranks in place, in one flat reduction of fixed layout."""
        if self.world == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.world
        for tensor, piece in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))

    def broadcast_(self, tensors: list[Tensor]) -> None:
        """Give every rank the tensors of rank 0, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def aside(self) -> Group:
        """Return the same ranks on a channel of their own, for a thread beside training; every rank must call."""
        key = id(dist.group.WORLD)
        if key not in _CHANNELS:  # kept as long as the process, as the group is
            _CHANNELS[key] = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        return replace(self, device=CPU, channel=_CHANNELS[key])

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-able value of every rank, in rank order."""
        if self.world == 1:
            return [value]
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order."""
        if self.world == 1:
            return [content]
        own = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([own.numel()], device=self.device), group=self.channel)
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own.to(self.device)
        found = [torch.zeros_like(padded) for _ in range(self.world)]
        dist.all_gather(found, padded, group=self.channel)
        return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(found, sizes, strict=True)]

    def ask_main(self, work: Callable[[], Any]) -> Any:
        """Return on every rank what a function returns, as JSON, on rank 0, where alone it is called.

        An error of ours that it raises is raised on every rank, as the kind that `etude.errors` knows.
        """
        found: list[Any] = [None, None, None]
        if self.is_main:
            try:
                found[0] = work()
            except EtudeError as error:
                known = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
                found[1:] = [known.__name__, str(error)]
        value, kind, fault = self.gather(found)[0]
        if kind is not None:
            raise getattr(errors, kind)(fault)
        return value

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum([0.0])


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int | None) -> torch.device:
    """Turn 'auto', 'cpu', 'cuda' or 'cuda:N' into a device that exists here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"training.device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"training.device: {name!r} asked for, but no CUDA device is available here; use cpu or auto")
    return torch.device("cuda", local_rank) if ":" not in name and local_rank is not None else device
