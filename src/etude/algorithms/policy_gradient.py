"""What the policy-gradient algorithms share: experience first, then a loss per micro-batch.

Shape letters: B rows, T tokens.

Statistics over groups need whole groups, so advantages are made once, over the whole experience, before it is cut into
micro-batches: the session calls `experience(policy, batch)` once a step with all rollouts of a rank;
`advantages(batch)` is enough if log-probs and values are there already. `prepare` fills in what micro-batches of given
data lack, and `loss` needs nothing but the rows it gets.
Statistics of a whole experience are those of all ranks: a session attaches the algorithm to its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from etude.algorithms import losses
from etude.algorithms.advantages import informative, overlong_penalty, token_rewards
from etude.algorithms.aggregate import Aggregation, aggregate
from etude.algorithms.kl import AdaptiveKLController, FixedKLController, Kind, kl
from etude.algorithms.masked import masked_sum
from etude.algorithms.moments import Gather, Moments, alone
from etude.errors import ConfigError, DataError
from etude.types import Loss
from etude.types.batch import Batch

if TYPE_CHECKING:
    from etude.trainer import Trainer


BEHIND_CAP = 2.0
"""The greatest weight of a token that was drawn with older weights, unless `tis_cap` says another."""


@dataclass(kw_only=True)
class PolicyGradient:
    """Base of algorithms that raise the probability of what did better than expected."""

    clips_around_old: ClassVar[bool] = True
    """Whether the loss stops at a distance from the old policy, rather than weighing it."""

    epochs: int = 1
    """Passes over each experience."""
    minibatches: int = 1
    """Optimizer updates per pass."""
    objective: Literal["clip", "importance_sampling"] = "clip"
    """What is maximised: the clipped ratio times the advantage (PPO), or the plain one."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative, above 1 (3 is usual)."""
    aggregation: Aggregation = "token_mean"
    """How tokens become one loss: token_mean, token_sum, sequence_mean or length_normalised."""
    length: int | None = None
    """Constant length for length_normalised; None is the longest completion of each experience."""
    temperature: float = 1.0
    """Temperature that the completions were sampled with."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy; 0 needs no reference."""
    kl_kind: Kind = "k3"
    """Estimator of the divergence: k1, abs, k2 or k3."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: as a loss, or subtracted from the reward of each token."""
    kl_target: float | None = None
    """Adapt kl_coef to hold the divergence here; with kl_in: reward."""
    kl_horizon: float = 10_000.0
    """Completions over which kl_coef adapts."""
    entropy_coef: float = 0.0
    """Weight of the entropy of the distributions that tokens are drawn from, as a bonus."""
    tis_cap: float | None = None
    """Truncated importance sampling: weigh tokens by p_old / p_sampler, at most this (2 is usual), for a sampler whose
    log-probabilities differ from the policy's own; None trusts the sampler's, unless it drew with older weights."""
    overlong_length: int | None = None
    """Longest completion, for a penalty on length; None is no penalty."""
    overlong_buffer: int = 0
    """Tokens before overlong_length over which the penalty grows from 0."""
    overlong_penalty: float = 1.0
    """Subtracted from the reward of a completion of overlong_length."""
    drop_equal_groups: bool = False
    """Let groups whose rewards are all equal weigh nothing, rather than 0 times their tokens."""

    def __post_init__(self) -> None:
        _require(self.epochs >= 1 and self.minibatches >= 1, "epochs and minibatches must be at least 1")
        _require(
            0 <= self.clip_low <= 1 and self.clip_high >= 0, "clip_low must be in [0, 1] and clip_high not negative"
        )
        _require(self.dual_clip is None or self.dual_clip > 1, "dual_clip must be above 1")
        _require(self.kl_coef >= 0 and self.temperature > 0, "kl_coef must not be negative, temperature positive")
        useless = self.kl_coef > 0 and self.kl_in == "loss" and self.kl_kind == "k1"
        _require(not useless, "k1 as a loss has a gradient of mean 0: choose kl_kind k2 or k3, or kl_in reward")
        _require(self.length is None or self.length >= 1, "length must be at least 1")
        _require(self.tis_cap is None or self.tis_cap > 0, "tis_cap must be positive")
        longest, buffer = self.overlong_length, self.overlong_buffer
        fits = buffer == 0 if longest is None else 0 <= buffer <= longest and longest >= 1
        _require(fits, "overlong_buffer lies between 0 and overlong_length, which is at least 1 and must be given")
        _require(self.overlong_penalty >= 0, "overlong_penalty must not be negative")
        adaptive = self.kl_target is not None
        _require(
            not adaptive or (self.kl_in == "reward" and self.kl_coef > 0), "kl_target needs kl_in reward and a kl_coef"
        )
        self.controller: FixedKLController | AdaptiveKLController = (
            FixedKLController(self.kl_coef)
            if self.kl_target is None
            else AdaptiveKLController(self.kl_coef, self.kl_target, self.kl_horizon)
        )
        self.gather: Gather = alone
        """How numbers are exchanged with the other ranks."""
        self.is_behind = False
        """Whether what it learns from was drawn with older weights."""
        self.updates_once = False
        """Whether an experience is known to be worth one update: the policy is then the old one while it lasts."""
        self.metrics: dict[str, tuple[float, float]] = {}
        """What the last experience has to tell: means and their weights, by name."""

    def attach(self, trainer: Trainer) -> None:
        """Take the statistics of an experience over all ranks of a session, and learn how old its rollouts are."""
        self.gather = trainer.session.gather
        self.learn_age(trainer.data, self.minibatches)

    def learn_age(self, data: Any, minibatches: int | None) -> None:
        """Learn from the data whether rollouts are older than the policy, and in how many updates a pass is made."""
        self.is_behind = bool(getattr(data, "is_ahead", False))
        self.updates_once = self.epochs == minibatches == 1 and not self.kl_coef

    @property
    def weight_cap(self) -> float | None:
        """The greatest weight of a token for what drew it not being what is trained; None weighs nothing.

        A clip holds the policy near the weights that it is taken around: around those that drew, one version ago, it
        would forbid what the step before has done. So the clip is around the weights at the beginning of the step, and
        the distance from there to those that drew is a weight.
        """
        if self.tis_cap is None and self.is_behind and self.clips_around_old and self.objective == "clip":
            return BEHIND_CAP
        return self.tis_cap

    # ---- what an algorithm is ------------------------------------------------------------------------------------

    @property
    def needs_values(self) -> bool:
        """Whether the policy must have a value head."""
        return False

    def estimate(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the advantages of whole groups, by row (B,) or by token (B, T), and other fields to keep."""
        raise NotImplementedError

    def token_loss(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the loss by token (B, T)."""
        old_BT, advantages_BT, mask_BT = (
            self.old_log_probs(log_probs_BT, batch),
            batch["advantages"],
            batch["loss_mask"],
        )
        if self.objective == "importance_sampling":
            return losses.importance_sampling(log_probs_BT, old_BT, advantages_BT, mask_BT)
        return losses.ppo_clip(
            log_probs_BT, old_BT, advantages_BT, mask_BT,
            clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip,
        )  # fmt: skip

    # ---- experience ----------------------------------------------------------------------------------------------

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        """Return a whole experience with all that `loss` needs and the batch does not have yet; ranks call together.

        Args:
            policy: What will be trained.
            batch: Rollouts of whole groups.
            rows: Rows to compute at a time; None is all.
        """
        with torch.no_grad():
            return self._experience(policy, Batch.of(batch).copy().require("loss_mask"), rows)

    def _experience(self, policy: Any, whole: Batch, rows: int | None) -> Batch:
        rows = rows or max(len(whole), 1)
        self._ask_policy(policy, whole, rows)
        if self.kl_coef and "ref_log_probs" not in whole.values:
            with policy.reference() as reference:
                found = self._in_parts(whole, rows, lambda part: self._log_probs(reference, part))
            whole.values["ref_log_probs"] = found
        if "advantages" in whole.values:
            return whole
        whole = self.advantages(whole)
        if self.kl_target is not None:
            divergence = kl(whole["old_log_probs"], whole["ref_log_probs"], self.kl_kind, mask_BT=whole["loss_mask"])
            counted = sum(self.gather(int((~whole.is_padding).sum())))
            self.controller.update(Moments.of(divergence, whole["loss_mask"]).over(self.gather).mean, counted)
            self.metrics = {"kl_coef": (self.controller.value, 1.0)}
        return whole

    def advantages(self, batch: Any) -> Batch:
        """Return a whole experience with its advantages; rows that only pad are in no statistics and get 0."""
        whole = Batch.of(batch).copy().require("loss_mask")
        kept_B = ~whole.is_padding
        for name, found in self.estimate(whole.select(kept_B)).items():
            filled = found.new_zeros(len(whole), *found.shape[1:])
            filled[kept_B] = found
            whole.values[name] = filled
        if self.aggregation == "length_normalised" and self.length is None:
            longest = int((whole["loss_mask"] != 0).sum(1).max()) if len(whole) else 0
            whole.metadata["longest"] = max(1, *self.gather(longest))
        if self.drop_equal_groups:
            teaches_B = torch.zeros_like(kept_B)
            real = whole.select(kept_B)
            teaches_B[kept_B] = informative(self.scores(real), self.groups(real))
            whole.values["loss_mask"] = torch.where(teaches_B[:, None], whole["loss_mask"], 0)
        return whole

    def prepare(self, policy: Any, batch: Any) -> Batch:
        """Return a batch with what is absent filled in; one that `experience` has seen comes back as it is.

        In evaluation ranks do not keep step and nothing may be learned: the statistics are then the batch's own.
        """
        if getattr(policy, "training", True):
            return self.experience(policy, batch)
        kept = self.gather, self.controller
        self.gather, self.controller = alone, FixedKLController(self.controller.value)
        try:
            return self.experience(policy, batch)
        finally:
            self.gather, self.controller = kept

    def _ask_policy(self, policy: Any, batch: Batch, rows: int) -> None:
        if self.needs_values and "values" not in batch.values:
            batch.values["values"] = self._in_parts(batch, rows, lambda part: self._values(policy, part))
        corrects = self.weight_cap is not None and "rollout_log_probs" not in batch.values
        if corrects and "old_log_probs" in batch.values:  # what came with the rollouts is the sampler's word
            batch.values["rollout_log_probs"] = batch.values["old_log_probs"]
            del batch.values["old_log_probs"]
        # Where there is one update, the weights at its beginning are those of the loss: `old_log_probs` says the same.
        is_known = "rollout_log_probs" in batch.values and self.updates_once
        if "old_log_probs" not in batch.values and not is_known:
            batch.values["old_log_probs"] = self._in_parts(batch, rows, lambda part: self._log_probs(policy, part))
        if corrects and "rollout_log_probs" not in batch.values:
            batch.values["rollout_log_probs"] = batch.values["old_log_probs"]

    def _in_parts(self, batch: Batch, rows: int, compute: Callable[[Batch], Tensor]) -> Tensor:
        return torch.cat([compute(part) for part in (batch.split(rows) or [batch])])

    def _log_probs(self, policy: Any, batch: Batch) -> Tensor:
        return _parts(policy.log_probs(batch, temperature=self.temperature))[0]

    def _values(self, policy: Any, batch: Batch) -> Tensor:
        values = _parts(policy.log_probs(batch, temperature=self.temperature, with_values=True))[1]
        if values is None:
            raise ConfigError(f"{type(self).__name__} needs a policy with a value head; build it with value_head: true")
        return values

    # ---- rewards -------------------------------------------------------------------------------------------------

    def token_rewards(self, batch: Batch) -> Tensor:
        """Return rewards by token (B, T): token_level_scores or the reward on the last token, less the divergence."""
        mask_BT = batch["loss_mask"]
        if "token_level_scores" in batch.values:
            rewards_BT = torch.where(mask_BT != 0, batch["token_level_scores"], 0.0)
        else:
            rewards_BT = token_rewards(batch.require("rewards")["rewards"], mask_BT)
        if self.overlong_length is not None:
            rewards_BT = rewards_BT + token_rewards(self._overlong(batch).to(rewards_BT.dtype), mask_BT)
        if self.kl_coef and self.kl_in == "reward":
            batch.require("old_log_probs", "ref_log_probs")
            divergence = kl(batch["old_log_probs"], batch["ref_log_probs"], self.kl_kind, mask_BT=mask_BT)
            rewards_BT = rewards_BT - self.controller.value * divergence
        return rewards_BT

    def scores(self, batch: Batch) -> Tensor:
        """Return one reward per row (B,), all told."""
        if "token_level_scores" in batch.values or (self.kl_coef and self.kl_in == "reward"):
            return masked_sum(self.token_rewards(batch), batch["loss_mask"], 1)
        rewards_B: Tensor = batch.require("rewards")["rewards"]
        return rewards_B if self.overlong_length is None else rewards_B + self._overlong(batch).to(rewards_B)

    def _overlong(self, batch: Batch) -> Tensor:
        assert self.overlong_length is not None
        bounds = {"longest": self.overlong_length, "buffer": self.overlong_buffer}
        return overlong_penalty((batch["loss_mask"] != 0).sum(1), **bounds, penalty=self.overlong_penalty)

    @staticmethod
    def groups(batch: Batch) -> Any:
        """Return which rows complete the same prompt."""
        for name in ("group_id", "uid"):
            if name in batch:
                return batch[name]
        raise DataError("the batch lacks 'group_id', which tells the completions of one prompt from those of another")

    # ---- loss ----------------------------------------------------------------------------------------------------

    def loss(self, policy: Any, batch: Any) -> Loss:
        """Return the loss of some rows of an experience."""
        batch = Batch.of(batch).require("loss_mask", "advantages")
        asked = {"with_entropy": True} if self.entropy_coef else {}
        asked |= {"with_values": True} if self.needs_values else {}
        found = policy.log_probs(batch, temperature=self.temperature, **asked)
        log_probs_BT, values_BT, entropy_BT = _parts(found)
        mask_BT = batch["loss_mask"]
        loss_BT = self.token_loss(log_probs_BT, batch)
        metrics = self.token_metrics(log_probs_BT.detach(), batch)
        if self.weight_cap is not None:
            old_BT = self.old_log_probs(log_probs_BT, batch)
            drawer_BT = batch.require("rollout_log_probs")["rollout_log_probs"]
            metrics["tis_weight"] = losses.truncated_weights(old_BT, drawer_BT, mask_BT, cap=self.weight_cap)
            metrics["drawer_kl"] = kl(drawer_BT, old_BT, "k3", mask_BT=mask_BT)
            loss_BT = loss_BT * metrics["tis_weight"]
        if self.kl_coef and self.kl_in == "loss":
            batch.require("ref_log_probs")
            kl_BT = kl(log_probs_BT, batch["ref_log_probs"], self.kl_kind, mask_BT=mask_BT)
            loss_BT = loss_BT + self.kl_coef * kl_BT
        if entropy_BT is not None and self.entropy_coef:
            loss_BT = loss_BT - self.entropy_coef * torch.where(mask_BT != 0, entropy_BT, 0.0)
            metrics["entropy"] = entropy_BT.detach()
        if values_BT is not None and self.needs_values:
            value_BT = self.value_loss(values_BT, batch)
            loss_BT = loss_BT + value_BT
            metrics["value_loss"] = value_BT.detach()
        length = batch.get("longest") if self.length is None else self.length
        return aggregate(loss_BT, mask_BT, self.aggregation, length=length, metrics=metrics)

    def old_log_probs(self, log_probs_BT: Tensor, batch: Batch) -> Tensor:
        """Return the log-probs of the policy that sampled; without any recorded, the present ones."""
        found: Tensor = batch["old_log_probs"] if "old_log_probs" in batch.values else log_probs_BT.detach()
        return found

    def value_loss(self, values_BT: Tensor, batch: Batch) -> Tensor:
        """Return the weighed loss of the values by token (B, T)."""
        return losses.value_loss(values_BT, batch.require("returns")["returns"], batch["loss_mask"])

    def token_metrics(self, log_probs_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return what is worth watching, by token (B, T), without gradient."""
        mask_BT, old_BT = batch["loss_mask"], self.old_log_probs(log_probs_BT, batch)
        ratio_BT = losses.log_ratio(log_probs_BT, old_BT, mask_BT)
        metrics = {"old_kl": kl(old_BT, log_probs_BT, "k3", mask_BT=mask_BT)}
        clipped_BT = self.clipped(ratio_BT, batch)
        if clipped_BT is not None:
            metrics["clip_fraction"] = clipped_BT
        if self.kl_coef and "ref_log_probs" in batch.values:
            metrics["kl"] = kl(log_probs_BT, batch["ref_log_probs"], "k3", mask_BT=mask_BT)
        return metrics

    def clipped(self, log_ratio_BT: Tensor, batch: Batch) -> Tensor | None:
        """Return 1 by token where the clip acts (B, T), or None without a clip."""
        if self.objective != "clip":
            return None
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return losses.clipped_fraction(log_ratio_BT, batch["advantages"], **clips)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        """Return what changes from one experience to the next."""
        return {"kl_coef": self.controller.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state."""
        self.controller.value = float(state["kl_coef"])


def _parts(found: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (log_probs, values, entropy) of what a policy's `log_probs` gave."""
    if isinstance(found, Tensor):
        return found, None, None
    return found.log_probs, found.values, found.entropy


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
