"""Trainers of each kind, which keep something from step to step and look at whole batches."""

from __future__ import annotations

from typing import Any

import torch

from etude.service import BaseTrainer, RemoteApiTrainer, SelfHostedTrainer
from etude.types import Batch, Trajectory


class Whitened(SelfHostedTrainer):
    """Compares with all rollouts of a step, less a running mean; draws noise, and asks the policy and its reference."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.baseline = torch.zeros(1)
        self.seen: dict[str, int] = {}

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        self._log_rollout_metrics(batch)
        rewards = batch.metadata["rewards"]
        self.baseline = 0.9 * self.baseline + 0.1 * rewards.mean()
        for run in batch["run_id"]:
            self.seen[f"run {run}"] = self.seen.get(f"run {run}", 0) + 1
        batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        batch = self._apply_kl_penalty(batch, beta=0.05)
        scores = batch.values["token_level_scores"].sum(1) - self.baseline + 0.01 * torch.randn(len(batch))
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        advantages[rewards == rewards.min()] *= 0.5
        batch.metadata["advantages"] = advantages
        return batch, {"baseline": float(self.baseline), "seen": sum(self.seen.values())}


class Ranked(RemoteApiTrainer):
    """Sets advantages by the place of a reward among all, scaled by how many steps there were."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps = 0

    def _prepare_trajectories(self, trajectories: list[Trajectory], metrics: dict[str, Any]) -> list[Trajectory]:
        self.steps += 1
        ordered = sorted(trajectories, key=lambda one: one.reward)
        for place, one in enumerate(ordered):
            one.advantage = (place / len(ordered) - 0.5) * self.steps + 0.01 * float(torch.randn(()))
        metrics["steps"] = self.steps
        return trajectories


class Own(BaseTrainer):
    """Makes its update itself, with a momentum of its own beside the optimizer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trend, self.history = 0.0, torch.zeros(3)

    def train(self, trajectories: Any) -> dict[str, Any]:
        batch = Batch.from_trajectories(trajectories, pad_token_id=self._pad_token_id)
        rewards = batch.metadata["rewards"]
        self.trend = 0.5 * self.trend + float(rewards.mean())
        self.history = torch.cat((self.history[1:], torch.tensor([self.trend])))
        log_probs = self.policy.log_probs(batch).sum(1)
        worth = rewards - self.trend + 0.01 * torch.randn(len(rewards))
        loss = -(log_probs * worth).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": float(loss.detach()), "trend": self.trend, "history": float(self.history.sum())}


KINDS = {"self_hosted": Whitened, "remote": Ranked, "base": Own}
