"""The rollouts of all ranks together, in one order that does not depend on how many ranks there are.

Every rank then holds them all: tokens, masks, log-probabilities and whatever else a trajectory carries. That is what
statistics over whole groups need, and what it costs: memory and traffic grow with the rollouts of a step, never with
the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.algorithms.moments import Gather
from etude.errors import DataError
from etude.rollouts.tasks import Task
from etude.types.trajectory import Trajectory


def gather_rollouts(own: Sequence[Trajectory], gather: Gather, world: int) -> tuple[list[Trajectory], list[int]]:
    """Return the trajectories of all ranks by (group_id, run_id), and the rank that each came from."""
    if world == 1:
        everyone = [(0, trajectory) for trajectory in own]
    else:
        sent = gather([{name: _plain(value, name) for name, value in one.items()} for one in own])
        everyone = [(rank, _trajectory(fields)) for rank, found in enumerate(sent) for fields in found]
    everyone.sort(key=lambda found: (_key(found[1], "group_id", "uid"), _key(found[1], "run_id")))
    return [trajectory for _, trajectory in everyone], [rank for rank, _ in everyone]


def gather_rows(own_RT: Tensor, rows: Sequence[int], size: int, gather: Gather) -> Tensor:
    """Return numbers by row of all ranks (B, T), of which this one has some `rows`."""
    found_BT = own_RT.new_zeros(size, *own_RT.shape[1:])
    for places, values in gather([list(rows), own_RT[: len(rows)].double().tolist()]):
        if places:
            found_BT[places] = torch.tensor(values, dtype=torch.float64, device=own_RT.device).to(own_RT.dtype)
    return found_BT


def _key(trajectory: Trajectory, *names: str) -> tuple[int, int, str]:
    """Return what orders names: numbers as numbers, before words; what has no name comes first."""
    found = next((trajectory.get(name) for name in names if trajectory.get(name) is not None), None)
    if found is None:
        return (0, 0, "")
    text = str(found)
    return (1, int(text), "") if text.lstrip("-").isdecimal() else (2, 0, text)


def _plain(value: Any, name: str) -> Any:
    """Return a value as JSON can hold it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.number | np.bool_):
        return value.item()
    if isinstance(value, Tensor | np.ndarray):
        tensor = torch.as_tensor(value).detach().cpu()
        return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.flatten().tolist()]}
    if isinstance(value, Task):
        return {"task": _plain(asdict(value), name)}
    if isinstance(value, Mapping):
        return {"items": [[_plain(key, name), _plain(item, name)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise DataError(
        f"the field {name!r} of a trajectory is a {type(value).__name__}, which cannot be sent to the other ranks; "
        "keep numbers, texts, lists, dictionaries and tensors there, or train on one rank"
    )


def _trajectory(fields: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{name: _restored(value) for name, value in fields.items()})


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        dtype, shape, numbers = content
        return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)
    restored = {_restored(key): _restored(item) for key, item in (content["items"] if kind == "task" else content)}
    return Task(**restored) if kind == "task" else restored
