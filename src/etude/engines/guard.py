"""The finite guard: NaN or infinity in a loss, gradient or reward stops before a weight changes, and says where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from etude.engines.distributed import Group
from etude.engines.sharding import local_tensor
from etude.errors import NonFiniteError

REWARD_KEYS = ("reward", "rewards")
MOST_IDS = 32
"""How many sample ids an error names before it only counts the rest."""


def check_rewards(batch: Any, micro: int) -> str | None:
    """Return a finding if a batch carries a reward that is not finite."""
    if not isinstance(batch, Mapping):
        batch = getattr(batch, "metadata", None)
        if not isinstance(batch, Mapping):
            return None
    for key in REWARD_KEYS:
        if key in batch and not torch.as_tensor(batch[key], dtype=torch.float64).isfinite().all():
            return f"{key} not finite in micro-batch {micro}"
    return None


def check_losses(totals: Iterable[float]) -> str | None:
    """Return a finding if the loss of a micro-batch is not finite."""
    for micro, total in enumerate(totals):
        if not math.isfinite(total):
            return f"loss is {total} in micro-batch {micro}"
    return None


def check_gradients(named: Mapping[nn.Parameter, str], params: Iterable[nn.Parameter]) -> str | None:
    """Return a finding that names the first parameters whose gradient is not finite."""
    bad = [named.get(p, "?") for p in params if p.grad is not None and not _finite(p.grad)]
    return (
        f"gradient not finite in {', '.join(bad[:3])}" + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        if bad
        else None
    )


def _finite(tensor: Tensor) -> bool:
    return bool(local_tensor(tensor).isfinite().all())


def stop(group: Group, step: int, finding: str | None, ids: Sequence[Any]) -> None:
    """Raise on every rank, naming step, rank and sample ids; all ranks must call this together."""
    lines = []
    for rank, (what, samples) in enumerate(group.gather([finding, _plain(ids)])):
        if what is not None:
            lines.append(f"step {step}, rank {rank}: {what}; samples {_shorten(samples)}")
    if not lines:
        lines = [f"step {step}: loss or gradient not finite after the reduction over ranks"]
    raise NonFiniteError("; ".join(lines) + ". No weight was changed.")


def _plain(ids: Any) -> Any:
    if isinstance(ids, list | tuple):
        return [_plain(item) for item in ids]
    return ids if isinstance(ids, int | str) else str(ids) if not hasattr(ids, "tolist") else ids.tolist()


def _shorten(samples: Any) -> str:
    flat: list[Any] = []
    for item in samples if isinstance(samples, list) else [samples]:
        flat.extend(item if isinstance(item, list) else [item])
    more = f" and {len(flat) - MOST_IDS} more" if len(flat) > MOST_IDS else ""
    return f"[{', '.join(map(str, flat[:MOST_IDS]))}]{more}"
