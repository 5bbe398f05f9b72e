"""`SelfHostedTrainer`: override `_prepare_batch`, and training follows what it makes of a step's rollouts.

Shape letters: B rows, T tokens, R rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from etude.algorithms.advantages import token_rewards
from etude.algorithms.kl import Kind, kl
from etude.algorithms.metrics import log_rollout_metrics
from etude.algorithms.policy_gradient import PolicyGradient
from etude.errors import ConfigError
from etude.rollouts.updates import weightless
from etude.service.base import BaseTrainer
from etude.service.gathering import gather_rows
from etude.service.options import make_loss
from etude.service.settings import train_service
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory, compute_position_id_with_mask

OWNER = "owner_rank"
"""The metadata that says which rank a row came from."""


class SelfHostedTrainer(BaseTrainer):
    """Define `_prepare_batch(batch) -> (batch, metrics)`; the rest of the update is ours.

    It sees the rollouts of a whole step, those of all ranks, before they are cut into micro-batches, and sets
    `advantages`. Fields it adds reach the loss: `compute_loss(policy, batch)`, or the algorithm that `algorithm.loss`
    names (GRPO's clipped loss unless it is said).
    """

    default_loss = "grpo"
    """The loss where `algorithm.loss` names none."""

    def __init__(self, config: Any = None) -> None:
        """Keep the configuration."""
        super().__init__(config)
        self._loss: Any = None
        self._value_network = ValueNetwork(self)

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return the batch with `advantages` and whatever the loss needs, and metrics to log; runs without gradient."""
        raise NotImplementedError(f"{type(self).__name__} defines no _prepare_batch(batch)")

    def compute_loss(self, policy: Any, batch: Batch) -> Any:
        """Return the loss of some rows: a `Loss`, `{"loss": mean, ...}` or a scalar mean."""
        return self._loss_algorithm.loss(policy, batch)

    @property
    def _loss_algorithm(self) -> Any:
        """The algorithm whose loss is trained on, made from the configuration when it is first asked for."""
        if self._loss is None:
            self._loss = self._make_loss()
        return self._loss

    def _make_loss(self) -> Any:
        return make_loss(self._config, self.default_loss)

    @property
    def _mini_batch_size(self) -> int | None:
        """Rows of one update over all ranks, where the training service's actor says so."""
        size = train_service(self._config).section("actor").get("ppo_mini_batch_size")
        return None if size is None else int(size)

    @property
    def _has_own_loss(self) -> bool:
        return type(self).compute_loss is not SelfHostedTrainer.compute_loss

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _log_rollout_metrics(self, batch: Batch) -> dict[str, Any]:
        """Log and return the mean, deviation, least and greatest reward, and the mean of each entry of `score`."""
        found: dict[str, Any] = {}
        log_rollout_metrics(_rewarded(batch), found)
        self._noted |= found
        return found

    def _reward_fn(self, batch: Batch) -> Tensor:
        """Return rewards by token (B, T): each row's reward on its last token that counts."""
        batch.require("rewards", "loss_mask")
        return token_rewards(batch.metadata["rewards"], batch.values["loss_mask"])

    def _compute_old_log_probs(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the policy as it is now (B, T); before there is one, those of the sampler."""
        if self._holder is None:
            found: Tensor = batch.require("old_log_probs")["old_log_probs"]
            return found
        return self._shared(batch, lambda part: self._log_probs(self.policy, part))

    def _compute_ref_log_probs(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the policy before training (B, T)."""
        policy: Any = self._held("reference policy").policy
        with policy.reference() as reference:
            return self._shared(batch, lambda part: self._log_probs(reference, part))

    def _compute_advantage(self, batch: Batch) -> Batch:
        """Return the batch with the advantages of the algorithm (GRPO's, unless `algorithm.loss` names another)."""
        algorithm = self._loss_algorithm
        if not isinstance(algorithm, PolicyGradient):
            raise ConfigError(
                f"{type(algorithm).__name__} knows no advantages; compute them in _prepare_batch, or choose another "
                "algorithm.loss"
            )
        batch = batch.copy()
        if "advantages" in batch:
            del batch.values["advantages"]
        if self._holder is None:
            return algorithm.advantages(batch)
        if algorithm.kl_coef and "ref_log_probs" not in batch.values:
            batch.values["ref_log_probs"] = self._compute_ref_log_probs(batch)
        if algorithm.needs_values and "values" not in batch.values:
            batch.values["values"] = self._value_network.predict(batch.values["input_ids"], batch)
        if "old_log_probs" not in batch.values:
            batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        return algorithm.experience(self.policy, batch, rows=self._rows)

    def _apply_kl_penalty(self, batch: Batch, beta: float = 0.1, kind: Kind = "k1") -> Batch:
        """Return the batch with beta times the divergence from the reference subtracted from `token_level_scores`."""
        batch = batch.copy()
        if "token_level_scores" not in batch.values:
            batch.values["token_level_scores"] = self._reward_fn(batch)
        if "ref_log_probs" not in batch.values:
            batch.values["ref_log_probs"] = self._compute_ref_log_probs(batch)
        if "log_probs" not in batch.values:
            batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        mask_BT = batch.values["loss_mask"]
        divergence_BT = kl(batch.values["log_probs"], batch.values["ref_log_probs"], kind, mask_BT=mask_BT)
        batch.values["token_level_scores"] = batch.values["token_level_scores"] - beta * divergence_BT
        self._noted["kl"] = float(divergence_BT.sum() / (mask_BT != 0).sum().clamp(min=1))
        return batch

    # ---- work that ranks share ---------------------------------------------------------------------------------------

    @property
    def _rows(self) -> int:
        return self._holder.config.batch_size if self._holder is not None else 32

    def _log_probs(self, policy: Any, batch: Batch) -> Tensor:
        found = policy.log_probs(batch, temperature=getattr(self._loss_algorithm, "temperature", 1.0))
        return found if isinstance(found, Tensor) else found.log_probs

    def _shared(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Return what the policy says of all rows, of which every rank computes its own; ranks call together."""
        with torch.no_grad():
            if self.world == 1 or OWNER not in batch:
                return torch.cat([compute(part) for part in batch.split(self._rows)])
            rows = [row for row, owner in enumerate(batch[OWNER]) if owner == self.rank]
            own = batch.select(rows) if rows else weightless(batch.select([0]))
            found_RT = torch.cat([compute(part) for part in own.split(self._rows)])
        assert self._holder is not None
        return gather_rows(found_RT, rows, len(batch), self._holder.session.gather)


def _rewarded(batch: Batch) -> list[Trajectory]:
    """Return what metrics ask of rows: their rewards, scores and groups."""
    rewards = batch.metadata["rewards"].tolist()
    names = [name for name in ("score", "group_id", "run_id") if name in batch]
    if "advantages" in batch:
        names.append("advantages")
    columns: Mapping[str, Any] = {name: batch.metadata[name] for name in names}
    kept = (~batch.is_padding).tolist()
    found = []
    for row, reward in enumerate(rewards):
        fields = {"advantage" if name == "advantages" else name: _at(column, row) for name, column in columns.items()}
        if kept[row]:
            found.append(Trajectory(reward=reward, extra_fields=fields))
    return found


def _at(column: Any, row: int) -> Any:
    return column[row].item() if isinstance(column, Tensor) else column[row]


class ValueNetwork:
    """The policy's value head, by token; it is trained along where the loss asks for values (`algorithm.loss: ppo`)."""

    def __init__(self, trainer: SelfHostedTrainer) -> None:
        self._trainer = trainer

    def predict(self, input_ids: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the value of each state in which a token was chosen (B, T), 0 where none was.

        Args:
            input_ids: The tokens.
            batch: What they are part of; None takes the pad token for padding, and all others as chosen.
        """
        trainer = self._trainer
        policy: Any = trainer._held("value network").policy
        if batch is None:
            real = input_ids != trainer._pad_token_id  # from the first token that is none to the last
            attention = (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)
            attention = attention.long()
            batch = Batch({"input_ids": input_ids, "attention_mask": attention, "loss_mask": attention.float()})
            batch.values["position_ids"] = compute_position_id_with_mask(attention)
        temperature = getattr(trainer._loss_algorithm, "temperature", 1.0)

        def values(part: Batch) -> Tensor:
            found = policy.log_probs(part, temperature=temperature, with_values=True).values
            if found is None:
                raise ConfigError("the policy has no value head; build it with value_head: true")
            return found  # type: ignore[no-any-return]

        return trainer._shared(batch, values)
