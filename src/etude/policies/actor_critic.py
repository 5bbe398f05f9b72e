"""A policy that draws its actions and says how likely they were: what learning from rewards needs to try things out.

Shape letters: B batch, T steps, N steps that count, A action, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.policies.base import PolicyModule, masked_loss
from etude.policies.language.head import LogProbs, entropy_of
from etude.policies.mlp import ACTIVATIONS
from etude.policies.normalize import Mode
from etude.policies.observation import ObservationEncoder
from etude.types import DataSpec, Loss


class Sample(NamedTuple):
    """Actions that were drawn, and how likely they were."""

    actions: Tensor
    """In the data's units, (B, *action_shape)."""
    log_probs: Tensor
    """(B,)."""


class ActorCritic(PolicyModule):
    """Draw actions around what a multilayer perceptron says, and estimate with another one what they will earn.

    Continuous actions are Gaussian, with a deviation that is learned and the same everywhere; discrete ones are drawn
    by their probability. Evaluation takes the mean, or the likeliest class. `forward` imitates, so that a policy can be
    cloned first and reinforced afterwards.

    Args:
        hidden: Width of each hidden layer, of the actor and of the critic.
        activation: relu, gelu, silu or tanh.
        std: Deviation of continuous actions before training, in normalised units.
        value_head: Whether there is a critic; algorithms without values want none.
        task_dim: Width of the embedding of a task, where there are several.
        normalization: Mode by role (state, environment, action) or feature name: mean_std, min_max, quantiles,
            identity. Simulators have no statistics but the bounds of actions, so identity unless given.
    """

    default_normalization = {"state": "identity", "environment": "identity", "action": "identity"}
    takes_relative_actions = False

    def __init__(
        self,
        hidden: list[int] | None = None,
        activation: str = "tanh",
        std: float = 1.0,
        value_head: bool = True,
        task_dim: int = 32,
        normalization: dict[str, Mode] | None = None,
    ) -> None:
        super().__init__(1, normalization=normalization)
        if activation not in ACTIVATIONS:
            raise ConfigError(f"ActorCritic activation {activation!r} is unknown; one of {', '.join(ACTIVATIONS)}")
        if std <= 0:
            raise ConfigError(f"std must be positive, got {std}")
        self.hidden = hidden if hidden is not None else [64, 64]
        self.activation, self.std, self.value_head, self.task_dim = activation, std, value_head, task_dim

    def make_layers(self, spec: DataSpec) -> None:
        """Create the layers for the features of an environment."""
        if images := spec.with_role("image"):
            raise ConfigError(f"ActorCritic reads states, not pictures such as {min(images)}; leave the cameras out")
        self.classes = spec[self.action_name].classes
        self.observation = ObservationEncoder(spec, task_dim=self.task_dim)
        # A first layer of actions near 0, so that exploration begins around the middle.
        self.actor = self._stack(self.classes or self.action_dim, 0.01)
        self.critic = self._stack(1, 1.0) if self.value_head else None
        if self.classes is None:
            self.log_std = nn.Parameter(torch.full((self.action_dim,), math.log(self.std)))

    def _stack(self, out: int, gain: float) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise([self.observation.out_dim, *self.hidden]):
            layers += [_linear(width_in, width_out, math.sqrt(2.0)), ACTIVATIONS[self.activation]()]
        return nn.Sequential(*layers, _linear([self.observation.out_dim, *self.hidden][-1], out, gain))

    # ---- trying things out -------------------------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """How many random numbers one action takes."""
        return self.action_dim if self.classes is None else 1

    @torch.no_grad()
    def sample(self, observation: Mapping[str, Any], uniforms: Tensor) -> Sample:
        """Draw an action for each row: a function of the observation and of random numbers from 0 to 1, (B, draws)."""
        self.require_built()
        out: Tensor = self.actor(self._features(self.normalizer.normalize(self.observations(observation))))
        if self.classes is None:
            drawn = out + self.log_std.exp() * torch.special.ndtri(uniforms).to(out)
            actions = self.normalizer.unnormalize_action(drawn.reshape(-1, *self.action_shape))
        else:
            # The first class at which the probabilities add up to more than the random number.
            reached = out.softmax(-1).cumsum(-1) > uniforms.to(out)
            drawn = self.classes - reached.sum(-1, keepdim=True).clamp(min=1)
            actions = drawn.reshape(-1, *self.action_shape)
        return Sample(actions, self._log_prob(out, drawn))

    @torch.no_grad()
    def value(self, observation: Mapping[str, Any]) -> Tensor | None:
        """Return what is expected from each row on, (B,); None without a value head."""
        if self.critic is None:
            return None
        return self._value(self._features(self.normalizer.normalize(self.observations(observation))))

    # ---- training ----------------------------------------------------------------------------------------------------

    def log_probs(
        self, batch: Any, *, temperature: float = 1.0, with_values: bool = False, with_entropy: bool = False
    ) -> Any:
        """Return the log-probability of every action that counts (`loss_mask`), (B, T) and zero elsewhere.

        The batch has the features by name, (B, T, ...). With values or entropy a `LogProbs` is returned.
        """
        if temperature != 1.0:
            raise ConfigError(f"actions are drawn as they are: the temperature is 1, not {temperature:g}")
        mask_BT = batch["loss_mask"].to(self.normalizer_device) != 0
        wanted = [name for name, feature in self.spec.features.items() if self.looks_at(name, feature)]
        picked = {name: batch[name].to(mask_BT.device)[mask_BT] for name in (*wanted, self.action_name)}
        normal = self.normalizer.normalize(picked)
        features = self._features(normal)
        out: Tensor = self.actor(features)
        found_N = self._log_prob(out, normal[self.action_name].reshape(-1, self.draws))
        log_probs_BT = _place(found_N, mask_BT)
        if not (with_values or with_entropy):
            return log_probs_BT
        values_N = self._value(features) if with_values else None
        values_BT = None if values_N is None else _place(values_N, mask_BT)
        return LogProbs(log_probs_BT, values_BT, _place(self._entropy(out), mask_BT) if with_entropy else None)

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        """Return the imitation loss: how unlikely the recorded actions are."""
        normal = self.normalizer.normalize(batch)
        target_BHA, valid_BH = self.targets(normal)
        out: Tensor = self.actor(self._features(normal))
        return masked_loss(-self._log_prob(out, target_BHA.flatten(1)).view(-1, 1, 1), valid_BH)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean, or the likeliest class, as a chunk of one."""
        out: Tensor = self.actor(self._features(batch))
        return out.unsqueeze(1) if self.classes is None else out.argmax(-1, keepdim=True)

    def _features(self, normal: Mapping[str, Any]) -> Tensor:
        features: Tensor = self.observation(normal)
        return features

    def _value(self, features: Tensor) -> Tensor | None:
        return None if self.critic is None else self.critic(features).squeeze(-1)

    def _log_prob(self, out: Tensor, drawn: Tensor) -> Tensor:
        if self.classes is not None:
            return out.log_softmax(-1).gather(-1, drawn.long()).squeeze(-1)
        distance = (drawn - out) * (-self.log_std).exp()
        return -(0.5 * distance.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def _entropy(self, out: Tensor) -> Tensor:
        if self.classes is not None:
            return entropy_of(out.log_softmax(-1))
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(out.shape[0])


def _linear(width_in: int, width_out: int, gain: float) -> nn.Linear:
    layer = nn.Linear(width_in, width_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _place(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)
