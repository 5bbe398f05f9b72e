"""A stochastic policy within bounds, with many critics and the price of predictability: what off-policy learning needs.

Shape letters: B batch, F features, A action, E critics, Z critics that are asked.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError
from etude.policies.actor_critic import Sample
from etude.policies.base import PolicyModule, masked_loss, single_action
from etude.policies.critics import CriticEnsemble
from etude.policies.mlp import ACTIVATIONS
from etude.policies.normalize import Mode
from etude.policies.observation import ObservationEncoder
from etude.types import DataSpec, Loss

LOG_STD_RANGE = (-10.0, 2.0)
"""Where the logarithm of the deviation is kept, before squashing."""
NEXT = "next."
"""What the names of a transition's later observation begin with."""


class Seen(NamedTuple):
    """Observations as the layers take them."""

    features: Tensor
    """(B, F)."""
    around: Tensor | None = None
    """What actions are corrections of, normalised, (B, A); None where they stand for themselves."""


class NormalSample(NamedTuple):
    """Normalised actions that were drawn, with the gradient of how."""

    actions: Tensor
    """Within [-1, 1], (B, A)."""
    log_probs: Tensor
    """(B,)."""


class SoftActorCritic(PolicyModule):
    """Draw actions from a Gaussian squashed into their bounds, and let many critics say what they will earn.

    Actions are scaled by their least and greatest values, which simulators give as bounds; where there are none they
    lie within -1 and 1. Evaluation takes the middle. `forward` imitates, so that a policy can be cloned first.

    Args:
        hidden: Width of each hidden layer, of the actor and of the critics.
        activation: relu, gelu, silu or tanh, of the actor.
        critics: How many critics there are.
        layer_norm: Whether the hidden layers of critics are normalised.
        std: Deviation of actions before training, in normalised units and before squashing.
        temperature: What a nat of entropy is worth before training.
        task_dim: Width of the embedding of a task, where there are several.
        normalization: Mode by role (state, environment, action) or feature name: mean_std, min_max, quantiles,
            identity. Observations are taken as they are unless given.
    """

    default_normalization = {"state": "identity", "environment": "identity"}
    takes_relative_actions = False

    def __init__(
        self,
        hidden: list[int] | None = None,
        activation: str = "relu",
        critics: int = 5,
        layer_norm: bool = True,
        std: float = 1.0,
        temperature: float = 1.0,
        task_dim: int = 32,
        normalization: dict[str, Mode] | None = None,
    ) -> None:
        super().__init__(1, normalization=normalization)
        who = type(self).__name__
        if activation not in ACTIVATIONS:
            raise ConfigError(f"{who} activation {activation!r} is unknown; one of {', '.join(ACTIVATIONS)}")
        if critics < 1:
            raise ConfigError(f"{who} needs at least one critic, got critics: {critics}")
        if std <= 0 or temperature <= 0:
            raise ConfigError(f"std and temperature of {who} must be positive, got {std} and {temperature}")
        self.hidden = hidden if hidden is not None else [256, 256]
        self.activation, self.layer_norm, self.task_dim = activation, layer_norm, task_dim
        self.critic_count, self.std, self.temperature_at_first = critics, std, temperature
        self._given = set(normalization or {})

    def build(self, spec: DataSpec) -> None:
        """Create the layers; actions are scaled by the bounds that come with them."""
        name, action = single_action(type(self).__name__, spec)
        if not self._given & {name, "action"}:
            is_bounded = {"min", "max"} <= set(action.stats or {})
            self.normalization = {**self.normalization, "action": "min_max" if is_bounded else "identity"}
        if "mean_std" in (self.normalization.get(name), self.normalization.get("action")):
            raise ConfigError(
                f"{type(self).__name__} keeps actions within -1 and 1, which normalization 'mean_std' does not; set "
                "normalization: {action: min_max}, or identity where they lie there already"
            )
        super().build(spec)

    def make_layers(self, spec: DataSpec) -> None:
        """Create the layers for the features of an environment or of demonstrations."""
        who = type(self).__name__
        if images := spec.with_role("image"):
            raise ConfigError(f"{who} reads states, not pictures such as {min(images)}; leave the cameras out")
        if spec[self.action_name].classes is not None:
            raise ConfigError(
                f"{who} takes continuous actions, not classes as {self.action_name} has; use actor_critic"
            )
        self.observation = ObservationEncoder(spec, task_dim=self.task_dim)
        self.actor = self._make_actor(self.observation.out_dim)
        inputs = self.observation.out_dim + self.action_dim
        self.critics = CriticEnsemble(inputs, self.hidden, self.critic_count, self.layer_norm)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(self.temperature_at_first)))

    def _make_actor(self, inputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise([inputs, *self.hidden]):
            layers += [nn.Linear(width_in, width_out), ACTIVATIONS[self.activation]()]
        last = nn.Linear([inputs, *self.hidden][-1], 2 * self.action_dim)
        with torch.no_grad():  # near the middle at first, with the deviation that was asked for
            last.weight.mul_(0.1)
            last.bias.zero_()[self.action_dim :] = math.log(self.std)
        return nn.Sequential(*layers, last)

    # ---- what an algorithm asks --------------------------------------------------------------------------------------

    @property
    def temperature(self) -> Tensor:
        """What a nat of entropy is worth."""
        return self.log_temperature.exp()

    def see(self, batch: Mapping[str, Any], prefix: str = "") -> Seen:
        """Return the observations of a batch as the layers take them; those after the actions with the prefix next."""
        named = {name: batch[prefix + name] for name in self.spec.features if prefix + name in batch}
        named |= {name: batch[name] for name in self.spec.with_role("task") if name in batch}  # which does not change
        return self._look(self.normalize_observation(self.observations(named)))

    def normal_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the actions of a batch, normalised, (B, A)."""
        actions: Tensor = self.normalizer.normalize({self.action_name: batch[self.action_name]})[self.action_name]
        return actions.reshape(actions.shape[0], -1)

    def draw(self, seen: Seen, noise_BA: Tensor) -> NormalSample:
        """Return the actions that standard normal noise makes, and how likely they are, with their gradient."""
        mean, log_std = self._distribution(seen.features)
        before = mean + log_std.exp() * noise_BA
        # log of the derivative of tanh, which does not underflow where tanh is flat
        flat = 2.0 * (math.log(2.0) - before - functional.softplus(-2.0 * before))
        log_probs = -(0.5 * noise_BA.square() + log_std + 0.5 * math.log(2 * math.pi) + flat).sum(-1)
        return NormalSample(self._place(before.tanh(), seen), log_probs)

    def follow(self, rate: float) -> None:
        """Move the critics that targets are made of by a share of the way to those that are trained."""
        self.target_critics.follow(self.critics, rate)

    # ---- acting ------------------------------------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """How many random numbers one action takes."""
        return self.action_dim

    @torch.no_grad()
    def sample(self, observation: Mapping[str, Any], uniforms: Tensor) -> Sample:
        """Draw an action for each row: a function of the observation and of random numbers from 0 to 1, (B, draws)."""
        self.require_built()
        seen = self._look(self.normalize_observation(self.observations(observation)))
        drawn = self.draw(seen, torch.special.ndtri(uniforms).to(seen.features))
        return Sample(self.unnormalize_action(drawn.actions.reshape(-1, *self.action_shape)), drawn.log_probs)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the middle of the distribution, as a chunk of one."""
        return self._middle(self._look(batch)).unsqueeze(1)

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        """Return the imitation loss: the squared error of the middle."""
        target_BHA, valid_BH = self.targets(self.normalizer.normalize(batch))
        middle_BA = self._middle(self.see(batch))
        return masked_loss((middle_BA.unsqueeze(1) - target_BHA).square(), valid_BH)

    # ---- layers ------------------------------------------------------------------------------------------------------

    def _look(self, normal: Mapping[str, Any]) -> Seen:
        return Seen(self.observation(normal))

    def _distribution(self, features_BF: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(features_BF).chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def _middle(self, seen: Seen) -> Tensor:
        return self._place(self._distribution(seen.features)[0].tanh(), seen)

    def _place(self, squashed_BA: Tensor, seen: Seen) -> Tensor:
        """Return the actions that numbers within -1 and 1 stand for."""
        return squashed_BA
