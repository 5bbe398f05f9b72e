"""The finite guard: NaN or infinity in a loss, gradient or reward stops before a weight changes, and says where."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from etude.errors import NonFiniteError
from etude.loop.distributed import Group
from etude.loop.sharding import local_tensor
from etude.runs.tree import split_tensors

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


def odd_from_the_start(module: nn.Module) -> frozenset[str]:
    """Return the buffers and frozen weights that are not finite before training, such as a mask of -inf."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return frozenset(not_finite({n: value for n, value in module.state_dict().items() if n not in trained}))


def require_finite(
    group: Group,
    step: int,
    tree: Mapping[str, Any],
    excused: Collection[str],
    last: object = None,
    sharded: bool = False,
) -> None:
    """Raise on every rank if an update has broken what is to be saved; all ranks must call this together.

    Losses and gradients are looked at before an update; what a huge rate or a division by zero makes of the weights
    would only show one step later, and what happens to the statistics of a batch norm never.

    Args:
        group: The ranks; what rank 0 holds is what is saved, and what the others hold where weights are sharded.
        step: Which step has been taken.
        tree: What is to be saved.
        excused: What `odd_from_the_start` returned.
        last: The checkpoint that stays the newest, for the message.
        sharded: Whether every rank holds a part of its own.
    """
    found = group.gather(check_state(tree, excused) if group.is_main or sharded else None)
    finding = next((one for one in found if one is not None), None)
    if finding is not None:
        kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        raise NonFiniteError(f"step {step}: {finding} after the update. Nothing was saved; {kept}")


def check_state(tree: Mapping[str, Any], excused: Collection[str] = ()) -> str | None:
    """Return a finding if weights, their average, buffers or optimizer state of a checkpoint are not finite."""
    for part, what in (("policy", "weights or buffers"), ("ema", "averaged weights"), ("optimizer", "optimizer state")):
        _, tensors = split_tensors(tree.get(part, {}))
        bad = [name for name in not_finite(tensors) if part == "optimizer" or name not in excused]
        if bad:
            return f"{what} not finite in {', '.join(bad[:3])}" + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    return None


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity."""
    held = {name: local_tensor(value) for name, value in tensors.items()}
    floats = {n: t for n, t in held.items() if isinstance(t, Tensor) and t.is_floating_point()}
    # A sum reads memory once and writes none: a third of the time of isfinite. It may overflow, so it only acquits.
    sums = [tensor.detach().sum(dtype=torch.float32) for tensor in floats.values()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for total in sums:
        by_device.setdefault(total.device, []).append(total)
    if all(bool(torch.stack(totals).isfinite().all()) for totals in by_device.values()):
        return []
    return [name for name, tensor in floats.items() if not bool(tensor.isfinite().all())]


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
