"""The functions that custom trainers call by their established names.

Shape letters: B rows, T tokens. New code finds the same in `advantages`, `kl` and `masked`.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from etude.algorithms.advantages import Ids, Single, Std, grpo, spread
from etude.algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalty
from etude.algorithms.masked import masked_mean, masked_sum, masked_whiten
from etude.types.trajectory import Trajectory

__all__ = [
    "AdaptiveKLController", "FixedKLController", "compute_grpo_advantage_for_trajectories",
    "compute_grpo_outcome_advantage", "kl_penalty", "masked_mean", "masked_whiten",
]  # fmt: skip


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    eos_mask: Tensor,
    index: Ids,
    epsilon: float = 1e-6,
    run_ids: Ids | None = None,
    *,
    single: Single = "zero",
) -> tuple[Tensor, Tensor, dict[Hashable, float]]:
    """Return GRPO's advantages on the tokens (B, T), the same as returns, and the deviation of each group.

    Args:
        token_level_rewards: Rewards by token (B, T); a row's score is their sum.
        eos_mask: 1 on the tokens of the completion (B, T).
        index: Which rows belong together.
        epsilon: Added to the (unbiased) deviation.
        run_ids: Average each run of a group first.
        single: What a group of one gets: zero, or the raw reward.
    """
    scores_B = masked_sum(token_level_rewards, eos_mask, 1)
    found_BT = spread(grpo(scores_B, index, run_ids=run_ids, eps=epsilon, single=single), eos_mask)
    groups: dict[Hashable, dict[Hashable, list[float]]] = {}
    names = index.tolist() if isinstance(index, Tensor) else list(index)
    runs = range(len(names)) if run_ids is None else run_ids.tolist() if isinstance(run_ids, Tensor) else list(run_ids)
    for name, run, score in zip(names, runs, scores_B.tolist(), strict=True):
        groups.setdefault(name, {}).setdefault(run, []).append(score)
    deviations: dict[Hashable, float] = {}
    for name, scores in groups.items():
        means = torch.tensor([sum(run) / len(run) for run in scores.values()], dtype=torch.float64)
        deviations[name] = float(means.std()) if len(means) > 1 else 1.0
    return found_BT, found_BT, deviations


def compute_grpo_advantage_for_trajectories(
    trajs: Sequence[Trajectory],
    epsilon: float = 1e-6,
    logger: logging.Logger | None = None,
    use_run_ids: bool = False,
    *,
    std: Std | None = None,
    single: Single = "zero",
) -> list[Trajectory]:
    """Give every trajectory its GRPO `advantage`, by group_id; one without a group is a group of its own.

    Args:
        trajs: Trajectories of whole groups.
        epsilon: Added to the deviation.
        logger: Where to say how many groups there were.
        use_run_ids: Average each run (run_id) of a group first.
        std: Divide by n - 1 (unbiased), n (population) or nothing; None is unbiased with run ids, else population.
        single: What a group of one gets: zero, or the raw reward.
    """
    listed = list(trajs)
    groups = [("group", t["group_id"]) if "group_id" in t else ("row", i) for i, t in enumerate(listed)]
    every_run = [("run", t["run_id"]) if "run_id" in t else ("row", i) for i, t in enumerate(listed)]
    rewards_B = torch.tensor([float(t.reward) for t in listed], dtype=torch.float64)
    kind: Std = std or ("unbiased" if use_run_ids else "population")
    runs = every_run if use_run_ids else None
    found_B = grpo(rewards_B, groups, run_ids=runs, std=kind, eps=epsilon, single=single)
    for trajectory, advantage in zip(listed, found_B.tolist(), strict=True):
        trajectory.advantage = advantage
    if logger is not None:
        logger.info("advantages of %d trajectories in %d groups", len(listed), len(set(groups)))
    return listed
