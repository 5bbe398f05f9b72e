"""A multilayer perceptron from state to action: the smallest policy that is one.

Shape letters: B batch, S state, A action or class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError, DataError
from etude.types import DataSpec, Feature, Loss

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
STD_FLOOR = 1e-6


class MLP(nn.Module):
    """Map the state to an action with a multilayer perceptron.

    Shapes, normalisation and the kind of action (continuous or one of several classes) come from the data.

    Args:
        hidden: Width of each hidden layer.
        dropout: Probability of dropping a hidden unit in training.
        activation: relu, gelu, silu or tanh.
    """

    def __init__(self, hidden: list[int] | None = None, dropout: float = 0.0, activation: str = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"MLP activation {activation!r} is unknown; one of {', '.join(ACTIVATIONS)}")
        self.hidden = hidden if hidden is not None else [128, 128]
        self.dropout = dropout
        self.activation = activation
        self.is_built = False

    def build(self, spec: DataSpec) -> None:
        """Create the layers for the features of a dataset."""
        states, actions = spec.with_role("state"), spec.with_role("action")
        if not states or len(actions) != 1:
            raise DataError(f"MLP needs state features and one action; the data has {sorted(spec.features)}")
        self.state_names = sorted(states)
        ((self.action_name, action),) = actions.items()
        self.classes = action.classes
        widths = [sum(math.prod(states[name].shape) for name in self.state_names), *self.hidden]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), ACTIVATIONS[self.activation]()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
        self.action_shape = action.shape
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], self.classes or math.prod(action.shape)))
        state_mean = torch.cat([_stat(states[name], "mean", 0.0) for name in self.state_names])
        state_std = torch.cat([_stat(states[name], "std", 1.0) for name in self.state_names])
        self.register_buffer("state_mean", state_mean)
        self.register_buffer("state_std", torch.where(state_std > STD_FLOOR, state_std, torch.ones_like(state_std)))
        if self.classes is None:
            self.register_buffer("action_mean", _stat(action, "mean", 0.0))
            action_std = _stat(action, "std", 1.0)
            self.register_buffer(
                "action_std", torch.where(action_std > STD_FLOOR, action_std, torch.ones_like(action_std))
            )
        self.is_built = True

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return class logits or normalised actions, (B, A)."""
        states_BS = torch.cat([batch[name].flatten(1) for name in self.state_names], dim=1)
        out: Tensor = self.net((states_BS - self.get_buffer("state_mean")) / self.get_buffer("state_std"))
        return out

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        """Return the summed imitation loss over the batch, with accuracy for discrete actions."""
        predicted_BA, target = self.predict(batch), batch[self.action_name]
        if self.classes is not None:
            target_B = target.reshape(-1).long()
            total = functional.cross_entropy(predicted_BA, target_B, reduction="sum")
            accuracy = (predicted_BA.detach().argmax(1) == target_B).float().mean()
            return Loss(total, target_B.numel(), {"accuracy": accuracy})
        target_BA = (target.flatten(1) - self.get_buffer("action_mean")) / self.get_buffer("action_std")
        error = functional.mse_loss(predicted_BA, target_BA, reduction="sum") / target_BA.shape[1]
        return Loss(error, target_BA.shape[0])

    @torch.no_grad()
    def select_action(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Return the action for each observation of a batch: a class index, or numbers in the data's own units."""
        predicted_BA = self.predict(observation)
        if self.classes is not None:
            return predicted_BA.argmax(1)
        actions = predicted_BA * self.get_buffer("action_std") + self.get_buffer("action_mean")
        return actions.view(-1, *self.action_shape)


def _stat(feature: Feature, name: str, default: float) -> Tensor:
    size = math.prod(feature.shape)
    if feature.stats is None or name not in feature.stats:
        return torch.full((size,), default)
    return torch.as_tensor(feature.stats[name], dtype=torch.float32).reshape(size).clone()
