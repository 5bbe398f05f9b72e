"""Ready trainers on batches: GRPO, cross-entropy, and on-policy distillation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.algorithms.kl import kl
from etude.algorithms.metrics import log_grpo_metrics
from etude.service.options import make_loss
from etude.service.self_hosted import SelfHostedTrainer, _rewarded
from etude.service.teachers import find_teacher
from etude.types.batch import Batch


class SelfHostedGrpoTrainer(SelfHostedTrainer):
    """Compare the completions of each prompt: (reward - mean) / deviation, with the clipped loss.

    Reads of `algorithm`: `do_old_log_prob_compute` (true computes the old log-probabilities anew with the policy;
    otherwise those that the sampler recorded are taken), `use_kl_in_reward` with `kl_penalty` and `kl_ctrl`, and every
    option of the loss.
    """

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return the batch with rewards and advantages."""
        metrics: dict[str, Any] = {}
        self._log_rollout_metrics(batch)
        batch = Batch.remove_redundant_left_padding(batch, pad_token_id=self._pad_token_id)
        batch = Batch.remove_redundant_right_padding(batch, pad_token_id=self._pad_token_id)
        batch.values["token_level_scores"] = self._reward_fn(batch)
        if self._config.section("algorithm").get("do_old_log_prob_compute"):
            batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        batch = self._compute_advantage(batch)
        log_grpo_metrics(_rewarded(batch), metrics)
        metrics |= _lengths(batch) | self._penalty_metrics(batch)
        return batch, metrics

    def _penalty_metrics(self, batch: Batch) -> dict[str, float]:
        algorithm = self._loss_algorithm
        if not getattr(algorithm, "kl_coef", 0.0) or "ref_log_probs" not in batch.values:
            return {}
        mask_BT = batch.values["loss_mask"]
        divergence_BT = kl(
            batch.values["old_log_probs"], batch.values["ref_log_probs"], algorithm.kl_kind, mask_BT=mask_BT
        )
        mean = float(divergence_BT.sum() / (mask_BT != 0).sum().clamp(min=1))
        return {"critic/kl": mean, "critic/kl_coeff": float(algorithm.controller.value)}


class SelfHostedCrossEntropyTrainer(SelfHostedTrainer):
    """Raise the probability of the tokens that count, each weighed by `weights` if the batch has them."""

    default_loss = "sft"

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return the batch as it is."""
        if "rewards" in batch:
            self._log_rollout_metrics(batch)
        return batch, _lengths(batch)


class SelfHostedOpdTrainer(SelfHostedTrainer):
    """On-policy distillation: the student writes, the teacher grades every token.

    The teacher is `teachers[0].base_model` or the service with `role: teacher`: the path of a language model, or a
    policy. Reads of `algorithm`: `distillation_coeff`, `entropy_coeff`, `temperature`, `loss_agg_mode`,
    `distillation_epochs`, `do_old_student_log_prob_compute`.
    """

    default_loss = "distillation"

    def _make_loss(self) -> Any:
        stated = self._config.section("algorithm")
        mean = {} if "loss_agg_mode" in stated or "aggregation" in stated else {"aggregation": "token_mean"}
        return make_loss(self._config, self.default_loss, teacher=find_teacher(self._config), **mean)

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return the batch with the teacher's grade of each token as its advantage."""
        self._log_rollout_metrics(batch)
        if self._config.section("algorithm").get("do_old_student_log_prob_compute"):
            batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        if "teacher_log_probs" not in batch.values:
            teacher = self._loss_algorithm._teacher(batch)
            batch.values["teacher_log_probs"] = self._shared(batch, lambda part: self._log_probs(teacher, part))
        batch = self._compute_advantage(batch)
        mask_BT = batch.values["loss_mask"]
        away_BT = kl(batch.values["old_log_probs"], batch.values["teacher_log_probs"], "k1", mask_BT=mask_BT)
        tokens = float((mask_BT != 0).sum())
        return batch, {"opd/teacher_kl": float(away_BT.sum()) / max(tokens, 1.0), "opd/valid_tokens": tokens}


def _lengths(batch: Batch) -> dict[str, float]:
    """Return how long prompts and completions are."""
    if "attention_mask" not in batch.values or "loss_mask" not in batch.values:
        return {}
    counted_BT = batch.values["loss_mask"] != 0
    any_B = counted_BT.any(1)
    position_T = torch.arange(counted_BT.shape[1], device=counted_BT.device)
    first_B = torch.where(counted_BT, position_T, counted_BT.shape[1]).amin(1)
    before_BT = (batch.values["attention_mask"] != 0) & (position_T < first_B[:, None])
    return {**_spread("response_length", counted_BT.sum(1)), **_spread("prompt_length", before_BT.sum(1)[any_B])}


def _spread(name: str, lengths_B: Tensor) -> dict[str, float]:
    if not lengths_B.numel():
        return {}
    numbers = lengths_B.double()
    return {
        f"{name}/mean": float(numbers.mean()),
        f"{name}/max": float(numbers.max()),
        f"{name}/min": float(numbers.min()),
    }
