"""What rollouts say about themselves, as plain floats."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from etude.types.trajectory import Trajectory


def log_rollout_metrics(trajs: Sequence[Trajectory], metrics: MutableMapping[str, Any]) -> None:
    """Add the mean, deviation, least and greatest reward (`rollout/reward_*`) and the mean of each entry of `score`."""
    rewards = [float(trajectory.reward) for trajectory in trajs]
    if not rewards:
        return
    metrics["rollout/reward_mean"] = fmean(rewards)
    metrics["rollout/reward_std"] = pstdev(rewards)
    metrics["rollout/reward_min"] = min(rewards)
    metrics["rollout/reward_max"] = max(rewards)
    scores: dict[str, list[float]] = {}
    for trajectory in trajs:
        score = trajectory.get("score")
        for name, value in score.items() if isinstance(score, dict) else ():
            scores.setdefault(name, []).append(float(value))
    metrics.update({f"rollout/{name}": fmean(values) for name, values in scores.items()})


def log_grpo_metrics(trajs: Sequence[Trajectory], metrics: MutableMapping[str, Any]) -> None:
    """Add the deviations within groups of several (`critic/grpo_std/*`), their number, and those of the advantages."""
    groups: dict[Hashable, list[float]] = {}
    for i, trajectory in enumerate(trajs):
        groups.setdefault(trajectory.get("group_id", ("row", i)), []).append(float(trajectory.reward))
    deviations = [pstdev(rewards) for rewards in groups.values() if len(rewards) > 1]
    metrics["critic/grpo_num_groups"] = float(len(deviations))
    if deviations:
        metrics["critic/grpo_std/mean"] = fmean(deviations)
        metrics["critic/grpo_std/min"] = min(deviations)
        metrics["critic/grpo_std/max"] = max(deviations)
    advantages = [float(t["advantage"]) for t in trajs if t.get("advantage") is not None]
    if advantages:
        metrics["critic/advantage_mean"] = fmean(advantages)
        metrics["critic/advantage_std"] = pstdev(advantages)
