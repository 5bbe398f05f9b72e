"""How much states tell of actions: lower bounds of the mutual information that two encoders make tight.

Shape letters: B batch, D width of an encoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from etude.algorithms.components.flow import observations
from etude.algorithms.components.update import Components, ComponentTrainer, ask
from etude.errors import ConfigError, DataError
from etude.policies.base import evaluating

Bound = Literal["infonce", "mine"]


class MutualInformation(ComponentTrainer):
    """Estimate from below, in nats, how much observations and actions tell of each other.

    The product of a state's and an action's encoding says how well they go together; pairs of the batch should score
    high, and states with the actions of other samples low.

    Args:
        bound: infonce (van den Oord et al. 2018), which cannot exceed the logarithm of the batch size, or mine
            (Belghazi et al. 2018), which can and is noisier.
        ema_decay: How slowly the running estimate follows, and with mine the partition that gradients go by.
    """

    required: ClassVar[tuple[str, ...]] = ("state_encoder", "action_encoder")
    optional: ClassVar[tuple[str, ...]] = ("backbone",)

    def __init__(
        self,
        *parts: Any,
        bound: Bound = "infonce",
        ema_decay: float = 0.99,
        **shared: Any,
    ) -> None:
        super().__init__(*parts, **shared)
        if bound not in get_args(Bound):
            raise ConfigError(f"bound {bound!r} is unknown; one of {', '.join(get_args(Bound))}")
        if not 0 <= ema_decay < 1:
            raise ConfigError(f"ema_decay must be from 0 to below 1, got {ema_decay}")
        self.bound, self.ema_decay, self.updates = bound, ema_decay, 0
        self.partition = torch.zeros((), device=self.device)
        self.running = torch.zeros((), device=self.device)

    def losses(self, data: Mapping[str, Any], epoch: int) -> dict[str, Tensor]:
        """Return what is minimised, and the bound of this batch and over the last ones."""
        scores_BB = score_pairs(self.models, data)
        # The first steps follow closely, so that what was there before them does not count.
        decay = min(self.ema_decay, self.updates / (1 + self.updates))
        self.updates += 1
        if self.bound == "infonce":
            found = infonce(scores_BB)
            total = -found
        else:
            found, partition = mine(scores_BB)
            with torch.no_grad():
                self.partition.copy_(log_lerp(partition.detach(), self.partition, decay))
            # The gradient of the logarithm of a mean, with the mean taken over many batches: one alone is biased.
            total = (partition - self.partition).exp() - scores_BB.diagonal().mean()
        with torch.no_grad():
            self.running.lerp_(found.detach(), 1 - decay)
        return {"total": total, "mutual_information": found, "mutual_information_running": self.running.clone()}

    @classmethod
    @torch.no_grad()
    def estimate(cls, models: Any, data: Mapping[str, Any], bound: Bound = "infonce") -> Tensor:
        """Return the bound over a batch; over data that was not trained on, it is one."""
        with evaluating(models if isinstance(models, nn.Module) else nn.ModuleDict(models)):
            scores_BB = score_pairs(models, data)
        return infonce(scores_BB) if bound == "infonce" else mine(scores_BB)[0]


def score_pairs(models: Components, data: Mapping[str, Any]) -> Tensor:
    """Return how well every state goes with every action of a batch, (B, B), in float32."""
    if "action" not in data:
        raise DataError(f"the batch has no action; it has {', '.join(map(str, data))}")
    states_BD = ask(models["state_encoder"], observations(models, data)).flatten(1).float()
    actions_BD = ask(models["action_encoder"], {"action": data["action"]}).flatten(1).float()
    if states_BD.shape[0] < 2:
        raise DataError("mutual information needs at least two samples a batch, so that there are wrong pairs")
    scores_BB: Tensor = states_BD @ actions_BD.t() / math.sqrt(states_BD.shape[1])
    return scores_BB


def infonce(scores_BB: Tensor) -> Tensor:
    """Return log B plus the mean log-probability of each state's own action among all of the batch."""
    return math.log(scores_BB.shape[0]) + scores_BB.log_softmax(1).diagonal().mean()


def mine(scores_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bound of Donsker and Varadhan, and its partition: the log of the mean of exp over wrong pairs."""
    count = scores_BB.shape[0]
    own_BB = torch.eye(count, dtype=torch.bool, device=scores_BB.device)
    wrong = scores_BB.masked_fill(own_BB, -torch.inf).flatten().logsumexp(0)
    partition = wrong - math.log(count * (count - 1))
    return scores_BB.diagonal().mean() - partition, partition


def log_lerp(new: Tensor, old: Tensor, decay: float) -> Tensor:
    """Return the logarithm of decay * exp(old) + (1 - decay) * exp(new)."""
    if decay == 0:
        return new
    return torch.logaddexp(old + math.log(decay), new + math.log(1 - decay))
