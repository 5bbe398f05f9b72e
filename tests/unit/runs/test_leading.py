"""What matters of a run: one order for the terminal, lists, reports and comparisons."""

from __future__ import annotations

import math

import pytest

from etude.runs.leading import find_best, lead, prefers_large

GRPO = ["train/loss", "train/clip_fraction", "train/kl", "train/reward", "train/reward_std", "train/rollout/failed",
        "epoch", "lr/policy", "time/step_ms"]  # fmt: skip


def test_reinforcement_leads_with_the_reward_and_ends_with_the_loss() -> None:
    order = lead(GRPO)
    assert order[:4] == ["train/reward", "train/clip_fraction", "train/kl", "train/loss"]
    assert lead([*GRPO, "eval/reward"])[0] == "eval/reward"


def test_imitation_leads_with_success_or_the_evaluation() -> None:
    names = ["train/loss", "train/accuracy", "eval/accuracy", "eval/loss"]
    assert lead(names) == ["eval/loss", "eval/accuracy", "train/loss", "train/accuracy"]
    assert lead([*names, "eval/success", "eval/steps", "eval/reward"])[0] == "eval/success"
    assert lead(names, "eval/accuracy")[0] == "eval/accuracy", "what checkpoints are ranked by was chosen"
    assert lead(["train/loss", "grad_norm/policy"])[0] == "train/loss"


@pytest.mark.parametrize(
    "name, large",
    [
        ("eval/loss", False),
        ("train/reward", True),
        ("eval/success_reach", True),
        ("eval/accuracy", True),
        ("x/y", None),
    ],
)
def test_it_is_known_which_way_is_better(name: str, large: bool | None) -> None:
    assert prefers_large(name) is large
    assert prefers_large(name, {"best_metric": name, "best_mode": "max"}) is True


def test_the_best_point_is_finite() -> None:
    assert find_best("eval/loss", [1, 2, 3], [3.0, math.nan, 2.0]) == (3, 2.0)
    assert find_best("eval/loss", [1, 2], [math.nan, math.inf]) is None
    assert find_best("train/kl", [1, 2], [1.0, 2.0]) is None
