"""Ready trainers on trajectories: GRPO, cross-entropy, and on-policy distillation."""

from __future__ import annotations

import logging
from typing import Any

import torch

from etude.algorithms import losses
from etude.algorithms.advantages import discounted_returns
from etude.algorithms.core_algos import compute_grpo_advantage_for_trajectories
from etude.algorithms.metrics import log_grpo_metrics
from etude.service.remote import RemoteApiTrainer
from etude.service.settings import train_service
from etude.service.teachers import Teacher
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory

log = logging.getLogger("etude")


class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """Compare the completions of each prompt: (reward - mean) / deviation, runs of several turns averaged first.

    The deviation is the unbiased one, as in the trainer on batches; equal rewards give exactly 0, and so does a group
    of one.
    """

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        """Set `advantage` on every trajectory."""
        prepared = compute_grpo_advantage_for_trajectories(trajectories, use_run_ids=True)
        log_grpo_metrics(prepared, metrics)
        lengths = [sum(1 for mark in one.loss_mask if mark) for one in prepared]
        metrics["response_length/mean"] = sum(lengths) / max(len(lengths), 1)
        metrics["response_length/max"] = max(lengths, default=0)
        metrics["response_length/min"] = min(lengths, default=0)
        return prepared


class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Raise the probability of the tokens that count, each weighed by `weights` if the trajectory has them."""

    default_loss = "cross_entropy"

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        """Return the trajectories as they are."""
        return trajectories


class RemoteApiOpdTrainer(RemoteApiTrainer):
    """On-policy distillation: `token_advantages` = coef (log p_teacher - log p_student) on the student's own text.

    `kl_penalty_coef` (1) and `kl_discount_factor` (0: each token is graded by itself alone) stand in
    `train_service.config` or under `algorithm`.
    """

    def __init__(self, config: Any = None) -> None:
        """Keep the configuration."""
        super().__init__(config)
        self._teacher = Teacher(self._config)

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        """Set `token_advantages` on every trajectory."""
        holder = self._held("policy")
        device = holder.session.group.device
        teacher = self._teacher.on(device)
        text = [Trajectory(one.tokens, one.loss_mask, 0.0) for one in trajectories]
        batch = Batch.from_trajectories(text, pad_token_id=self._pad_token_id).to(device)
        mask_BT, heat = batch["loss_mask"], holder.service.temperature
        student_BT, teacher_BT = (self._log_probs(policy, batch, heat) for policy in (self.policy, teacher))
        recorded = [one.get("logprobs") for one in trajectories]
        if all(found is not None for found in recorded):
            known = [Trajectory(o.tokens, o.loss_mask, 0.0, logprobs=o.logprobs) for o in trajectories]
            student_BT = Batch.from_trajectories(known).to(device)["old_log_probs"]
        grades_BT = losses.distillation_advantages(student_BT, teacher_BT, mask_BT)
        coef, discount = (self._stated(name, default) for name, default in _DEFAULTS)
        advantages_BT = coef * discounted_returns(grades_BT, mask_BT, gamma=discount)
        for row, one in enumerate(trajectories):
            one.token_advantages = advantages_BT[row, : len(one.tokens)].tolist()
        tokens = float((mask_BT != 0).sum())
        metrics["opd/teacher_kl"] = -float(grades_BT.sum()) / max(tokens, 1.0)
        metrics["opd/valid_tokens"] = tokens
        return trajectories

    def _log_probs(self, policy: Any, batch: Batch, temperature: float) -> torch.Tensor:
        assert self._holder is not None
        rows = self._holder.config.batch_size
        with torch.no_grad():
            return torch.cat([policy.log_probs(part, temperature=temperature) for part in batch.split(rows)])

    def _stated(self, name: str, default: float) -> float:
        config, section = train_service(self._config).section("config"), self._config.section("algorithm")
        return float(section.get(name, config.get(name, default)))


_DEFAULTS = (("kl_penalty_coef", 1.0), ("kl_discount_factor", 0.0))
