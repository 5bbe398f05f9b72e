"""Rollouts in place of others, or beside them: groups that teach nothing, and greedy completions to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from etude.algorithms.advantages import informative
from etude.rng import fold
from etude.rollouts.drawing import Drawing, paid
from etude.types.trajectory import Trajectory


def replace_equal_groups(
    drawing: Drawing, policy: Any, rollouts: list[Trajectory], rounds: int, *seed: int
) -> tuple[list[Trajectory], int]:
    """Draw groups whose rewards are all equal anew, of other tasks; return all rollouts, and how many were drawn.

    Which tasks is a function of (seed, round, position), so that a resumed run draws the same. Groups that are still
    equal after the last round stay.
    """
    drawn = 0
    for attempt in range(1, rounds + 1):
        judged = paid(rollouts)
        teaches = informative(torch.tensor([r.reward for r in judged]).double(), [r.group_id for r in judged])
        lively = {rollout.group_id for rollout, good in zip(judged, teaches.tolist(), strict=True) if good}
        equal = sorted({int(rollout.group_id) for rollout in judged if rollout.group_id not in lively})
        if not equal:
            break
        key = fold(*seed, attempt)
        tasks = [drawing.tasks[fold(key, position) % len(drawing.tasks)] for position in equal]
        fresh = drawing.collect(policy, equal, key, tasks)
        kept = [rollout for rollout in rollouts if int(rollout.group_id) not in set(equal)]
        rollouts = sorted(kept + fresh, key=lambda rollout: (int(rollout.group_id), rollout.run_id))
        drawn += len(equal)
    return rollouts, drawn


def compare_with_greedy(
    drawing: Drawing, policy: Any, rollouts: Sequence[Trajectory], positions: Sequence[int]
) -> None:
    """Note what the greedy completion of each prompt earns; without it, a rollout cannot be compared."""
    kept, size = drawing.sampling, drawing.group_size
    drawing.sampling, drawing.group_size = replace(kept, greedy=True), 1
    try:
        greedy = drawing.collect(policy, positions, 0)
    finally:
        drawing.sampling, drawing.group_size = kept, size
    found = {rollout.group_id: rollout for rollout in greedy}
    for rollout in rollouts:
        rollout.greedy_rewards = found[rollout.group_id].reward
        if rollout.greedy_rewards is None:
            rollout.greedy_rewards, rollout.reward, rollout.error = 0.0, None, found[rollout.group_id].error
