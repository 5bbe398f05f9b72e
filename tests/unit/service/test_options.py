"""Options by the names of recipes reach our algorithms, on stand-in policies and on the tiny one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.algorithms import GRPO, PPO, SFT
from etude.algorithms.kl import AdaptiveKLController, FixedKLController
from etude.errors import ConfigError
from etude.service import SelfHostedGrpoTrainer, SelfHostedOpdTrainer
from etude.service.options import make_loss
from etude.service.settings import Settings
from etude.types import create_dummy_batch


def made(algorithm: dict[str, Any] | None = None, actor: dict[str, Any] | None = None) -> Any:
    return make_loss(Settings.of({"algorithm": algorithm or {}, "train_service": {"x": {"actor": actor or {}}}}))


def test_without_options_the_loss_is_that_of_grpo() -> None:
    assert made() == GRPO()


@pytest.mark.parametrize(
    "algorithm, actor, expected",
    [
        ({"clip_low": 0.1, "epochs": 3}, {}, GRPO(clip_low=0.1, epochs=3)),
        ({}, {"clip_ratio": 0.3, "ppo_epochs": 2}, GRPO(clip_low=0.3, clip_high=0.3, epochs=2)),
        ({}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "clip_ratio_c": 3.0},
         GRPO(clip_low=0.1, clip_high=0.4, dual_clip=3.0)),
        ({}, {"clip_ratio_c": 3.0, "loss_func_type": "NX_20241031"}, GRPO()),
        ({"entropy_coeff": 0.01}, {"entropy_coeff": 0.02}, GRPO(entropy_coef=0.01)),
        ({"loss_agg_mode": "token-mean"}, {}, GRPO(aggregation="token_mean")),
        ({"loss_agg_mode": "seq-mean-token-sum"}, {}, GRPO(aggregation="token_sum")),
        ({"loss_agg_mode": "seq-mean-token-mean"}, {}, GRPO(aggregation="sequence_mean")),
        ({}, {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"}, GRPO(kl_coef=0.2)),
        ({}, {"use_kl_loss": False, "kl_loss_coef": 0.2}, GRPO()),
        ({"loss": "importance_sampling"}, {}, GRPO(objective="importance_sampling")),
        ({"loss": "cross_entropy"}, {}, SFT()),
        ({"loss": "ppo", "lam": 0.9}, {}, PPO(lam=0.9)),
        ({"loss": {"type": "grpo", "params": {"eps": 0.1}}}, {}, GRPO(eps=0.1)),
        ({"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed", "kl_reward_coef": 0.3}}, {},
         GRPO(kl_coef=0.3, kl_in="reward", kl_kind="k1")),
        ({"use_kl_in_reward": True, "kl_penalty": "low_var_kl", "critic": {"kl_ctrl": {"target_kl": 2.0}}}, {},
         GRPO(kl_coef=0.1, kl_in="reward", kl_kind="k3", kl_target=2.0)),
    ],
)  # fmt: skip
def test_names_of_recipes_are_options_of_ours(algorithm: Any, actor: Any, expected: Any) -> None:
    assert made(algorithm, actor) == expected


def test_the_controller_is_the_one_that_was_configured() -> None:
    assert isinstance(made({"use_kl_in_reward": True}).controller, AdaptiveKLController)
    fixed = made({"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed"}}).controller
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.1


@pytest.mark.parametrize(
    "algorithm, message",
    [
        ({"loss": "grppo"}, "unknown algorithm 'grppo'; did you mean 'grpo'"),
        ({"loss": 3}, "algorithm.loss must name a loss, got 3"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode 'mean' is not known; choose from token-mean"),
        ({"use_kl_in_reward": True, "kl_penalty": "x"}, "kl_penalty 'x' is not known"),
        ({"use_kl_in_reward": True, "kl_ctrl": {"type": "x"}}, "algorithm.kl_ctrl.type 'x' is not known"),
    ],
)
def test_values_that_mean_nothing_are_refused(algorithm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(algorithm)


def test_a_penalty_in_the_reward_lowers_the_advantage_of_what_strays() -> None:
    batch = create_dummy_batch()
    batch.metadata["rewards"] = torch.ones(4)
    batch.values["ref_log_probs"] = batch.values["old_log_probs"].clone()
    batch.values["ref_log_probs"][0] -= 1.0  # the first row is likelier than the reference finds it
    inner = SelfHostedGrpoTrainer({"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed"}}})
    prepared, metrics = inner._prepare_batch(batch)
    advantages = prepared.metadata["advantages"]
    assert advantages[0] < 0 < advantages[1] and advantages[2] == advantages[3] == 0
    assert metrics["critic/kl"] > 0 and metrics["critic/kl_coeff"] == pytest.approx(0.1)


def test_distillation_takes_its_options_and_the_teacher_of_a_service() -> None:
    names = {"distillation_coeff": 0.5, "entropy_coeff": 0.1, "temperature": 0.7, "distillation_epochs": 2}
    services = {"student": {"role": "actor"}, "big": {"role": "teacher", "actor": {"model": {"path": "some/model"}}}}
    loss = SelfHostedOpdTrainer({"algorithm": names, "train_service": services})._loss_algorithm
    assert (loss.coef, loss.entropy_coef, loss.temperature, loss.epochs) == (0.5, 0.1, 0.7, 2)
    assert loss.aggregation == "token_mean" and loss.teacher == "some/model"
