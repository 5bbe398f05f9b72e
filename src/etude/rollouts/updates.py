"""How an experience becomes updates: the same rows in each of them, however many ranks share the experience."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from etude.algorithms.moments import Gather
from etude.rng import fold
from etude.types import Rollouts, Updates
from etude.types.batch import Batch
from etude.types.protocols import Place
from etude.types.trajectory import Trajectory

EXPERIENCED = "is_experience"
"""What marks a batch as rows of an experience: there is nothing left to prepare."""


def learn_from(
    rollouts: Rollouts, algorithm: Any, policy: Any, place: Place, step: int, gather: Gather, device: torch.device,
    witness: Callable[[Any], None] | None = None,
) -> Updates:  # fmt: skip
    """Let an algorithm make its experience of a step's rollouts, all at once, and cut it into updates.

    A witness sees the experience before it is cut.
    """
    completed: Any = rollouts.completed
    if getattr(algorithm, "takes_trajectories", False):  # as they are: it stacks them itself, if at all
        completed = [] if rollouts.are_padding else list(completed)
    elif completed and isinstance(completed[0], Trajectory):
        completed = Batch.from_trajectories(completed, pad_token_id=getattr(policy, "pad_token_id", 0)).to(device)
        completed = weightless(completed) if rollouts.are_padding else completed
    found = algorithm.experience(policy, completed, rows=place.batch_size)
    if witness is not None:
        witness(found)
    return found if isinstance(found, Updates) else as_updates(found, algorithm, place, step, gather)


def is_experience(batch: Any) -> bool:
    """Tell whether a micro-batch was cut from an experience."""
    return isinstance(batch, Batch) and EXPERIENCED in batch.metadata


def as_updates(batch: Batch, algorithm: Any, place: Place, step: int, gather: Gather) -> Updates:
    """Cut this rank's part of an experience into updates, and updates into micro-batches.

    An algorithm may ask for several passes (`epochs`) of several updates (`minibatches`). Which rows of all ranks make
    up an update is a function of (seed, step, pass) and of the names of the rows (`group_id`, `run_id`).
    """
    count, groups = getattr(algorithm, "minibatches", 1), []
    batch = batch.copy()
    batch.metadata[EXPERIENCED] = True
    for epoch in range(getattr(algorithm, "epochs", 1)):
        for rows in _shares(batch, count, fold(place.seed, step, epoch), gather):
            # A rank that has no row of an update has one that weighs nothing: all ranks take all updates.
            chosen = batch.select(rows) if rows or not len(batch) else weightless(batch.select([0]))
            groups.append([_without_padding(micro) for micro in chosen.split(place.batch_size) or [chosen]])
    return Updates(groups)


def _shares(batch: Batch, count: int, key: int, gather: Gather) -> list[list[int]]:
    """Return which rows of this rank belong to each of `count` updates, all about equally large over all ranks."""
    if count == 1:
        return [list(range(len(batch)))]
    groups = [int(name) for name in batch["group_id"]]
    runs = [int(name) for name in batch["run_id"]] if "run_id" in batch else [0] * len(batch)
    own = [fold(key, group, run) for group, run in zip(groups, runs, strict=True)]
    everyone = sorted(found for rank in gather(own) for found in rank)
    update = {found: place * count // len(everyone) for place, found in enumerate(everyone)}
    return [[row for row, found in enumerate(own) if update[found] == number] for number in range(count)]


def weightless(batch: Batch) -> Batch:
    """Return a batch whose rows are only there to be gone through: nothing in them counts."""
    batch = batch.copy()
    for name in batch.values:
        if name.endswith("loss_mask"):
            batch.values[name] = torch.zeros_like(batch.values[name])
    batch.values["is_padding"] = torch.ones_like(batch.is_padding)
    return batch


def _without_padding(batch: Batch) -> Batch:
    return Batch.remove_redundant_right_padding(batch, anchor_field="loss_mask") if "loss_mask" in batch else batch
