"""The functions that custom trainers call by their established names."""

from __future__ import annotations

import logging

import pytest
import torch

from etude.algorithms.core_algos import (
    compute_grpo_advantage_for_trajectories,
    compute_grpo_outcome_advantage,
    kl_penalty,
    masked_mean,
    masked_whiten,
)  # fmt: skip
from etude.algorithms.metrics import log_grpo_metrics, log_rollout_metrics
from etude.types import Trajectory


def rollouts(rewards: list[float], groups: list[object], runs: list[object] | None = None) -> list[Trajectory]:
    made = [Trajectory([1], [1], reward, group_id=group) for reward, group in zip(rewards, groups, strict=True)]
    for trajectory, run in zip(made, runs or [], strict=False):
        trajectory.run_id = run
    return made


def test_outcome_advantages_are_spread_over_the_tokens() -> None:
    rewards = torch.tensor([[0.0, 1.0, 9.0], [0.0, 2.0, 9.0], [1.5, 0.0, 9.0], [0.0, 2.5, 9.0]])
    mask = torch.tensor([[1, 1, 0]] * 4)
    found, returns, deviations = compute_grpo_outcome_advantage(rewards, mask, [0, 0, 1, 1])
    assert found[:, 0].tolist() == pytest.approx([-0.7071058, 0.7071058] * 2, abs=1e-6)
    assert torch.equal(found[:, 0], found[:, 1]) and found[:, 2].abs().sum() == 0 and torch.equal(found, returns)
    assert deviations == {0: pytest.approx(0.7071, abs=1e-4), 1: pytest.approx(0.7071, abs=1e-4)}
    by_tensor, _, named = compute_grpo_outcome_advantage(rewards, mask, torch.tensor([0, 0, 1, 1]))
    assert torch.equal(by_tensor, found) and set(named) == {0, 1}
    runs, _, spread = compute_grpo_outcome_advantage(
        torch.tensor([[1.0], [1.0], [1.0], [0.0]]), torch.ones(4, 1), ["p"] * 4, run_ids=[0, 0, 0, 1]
    )
    assert runs[:, 0].tolist() == pytest.approx([0.7071058] * 3 + [-0.7071058], abs=1e-6)
    assert spread["p"] == pytest.approx(0.7071, abs=1e-4)
    raw, _, alone = compute_grpo_outcome_advantage(torch.tensor([[0.7]]), torch.ones(1, 1), [0], single="raw")
    assert raw.item() == pytest.approx(0.6999993, abs=1e-6) and alone == {0: 1.0}


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 2.0], [-0.999998, 0.999998]),
        ([0.0, 0.0, 1.0, 1.0], [-0.999998] * 2 + [0.999998] * 2),
        ([1.0, 0.0, 0.0, 0.0], [1.732047] + [-0.577349] * 3),
        ([0.1] * 7, [0.0] * 7),
        ([0.7], [0.0]),
        ([], []),
    ],
)
def test_advantages_of_trajectories(rewards: list[float], expected: list[float]) -> None:
    made = rollouts(rewards, [0] * len(rewards))
    found = compute_grpo_advantage_for_trajectories(made)
    assert [t.advantage for t in found] == pytest.approx(expected, abs=1e-6)
    assert all(one is other for one, other in zip(found, made, strict=True))


def test_runs_are_averaged_first_and_one_run_is_no_nan() -> None:
    made = rollouts([1.0, 1.0, 1.0, 0.0, 0.5, 0.7], ["p"] * 4 + ["q"] * 2, [0, 0, 0, 1, 0, 0])
    found = compute_grpo_advantage_for_trajectories(made, logger=logging.getLogger("x"), use_run_ids=True)
    assert [t["advantage"] for t in found[:4]] == pytest.approx([0.7071058] * 3 + [-0.7071058], abs=1e-6)
    assert [t["advantage"] for t in found[4:]] == [0.0, 0.0]


def test_a_trajectory_without_a_group_is_its_own() -> None:
    found = compute_grpo_advantage_for_trajectories([Trajectory([1], [1], r) for r in (1.0, 5.0)])
    assert [t.advantage for t in found] == [0.0, 0.0]
    raw = compute_grpo_advantage_for_trajectories([Trajectory([1], [1], 0.7)], single="raw")
    assert raw[0].advantage == pytest.approx(0.6999993, abs=1e-7)


def test_metrics_are_plain_floats() -> None:
    made = rollouts([1.0, 0.0, 1.0, 1.0, 3.0], [0, 0, 1, 1, 2])
    for i, trajectory in enumerate(made):
        trajectory.score = {"accuracy": float(i)}
    compute_grpo_advantage_for_trajectories(made)
    metrics: dict[str, float] = {}
    log_rollout_metrics(made, metrics)
    log_grpo_metrics(made, metrics)
    assert metrics == {
        "rollout/reward_mean": pytest.approx(1.2), "rollout/reward_std": pytest.approx(0.9797959),
        "rollout/reward_min": 0.0, "rollout/reward_max": 3.0, "rollout/accuracy": 2.0,
        "critic/grpo_num_groups": 2.0, "critic/grpo_std/mean": 0.25, "critic/grpo_std/min": 0.0,
        "critic/grpo_std/max": 0.5, "critic/advantage_mean": pytest.approx(0.0),
        "critic/advantage_std": pytest.approx((2 * 0.999998**2 / 5) ** 0.5),
    }  # fmt: skip
    assert all(type(value) is float for value in metrics.values())
    empty: dict[str, float] = {}
    log_rollout_metrics([], empty)
    assert empty == {}


def test_the_other_names_are_there() -> None:
    assert kl_penalty(torch.tensor(1.0), torch.tensor(0.5), "kl").item() == 0.5
    assert masked_mean(torch.tensor([1.0, 3.0]), torch.tensor([1, 0])).item() == 1.0
    assert masked_whiten(torch.tensor([1.0, 3.0]), torch.tensor([1, 1])).tolist() == pytest.approx([-1.0, 1.0])
