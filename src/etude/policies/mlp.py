"""A multilayer perceptron from observation to actions: the smallest policy that is one.

Shape letters: B batch, H actions in a chunk, A action, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError
from etude.policies.base import PolicyModule, masked_loss
from etude.policies.observation import ObservationEncoder
from etude.policies.options import SharedKeywords, SharedOptions
from etude.types import DataSpec, Loss

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(PolicyModule):
    """Map the observation to actions with a multilayer perceptron.

    Shapes, normalisation and the kind of action (continuous or one of several classes) come from the data.

    Args:
        hidden: Width of each hidden layer.
        dropout: Probability of dropping a hidden unit in training.
        activation: relu, gelu, silu or tanh.
        chunk_size: Actions predicted at once.
        n_action_steps: Actions executed of each chunk; None is all of them.
        n_obs_steps: Observations in a row that the policy sees.
        loss: How errors of continuous actions count: mse or l1.
        task_dim: Width of the embedding of a task, where there are several.
        keywords: Fields of `SharedOptions`: how chunks are executed and how images are read.
    """

    def __init__(
        self,
        hidden: list[int] | None = None,
        dropout: float = 0.0,
        activation: str = "relu",
        chunk_size: int = 1,
        n_action_steps: int | None = None,
        n_obs_steps: int = 1,
        loss: Literal["mse", "l1"] = "mse",
        task_dim: int = 32,
        **keywords: SharedKeywords,
    ) -> None:
        shared = SharedOptions(**keywords)
        super().__init__(chunk_size, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps, **shared.execution)
        if activation not in ACTIVATIONS:
            raise ConfigError(f"MLP activation {activation!r} is unknown; one of {', '.join(ACTIVATIONS)}")
        if loss not in ("mse", "l1"):
            raise ConfigError(f"MLP loss {loss!r} is unknown; one of mse, l1")
        self.hidden = hidden if hidden is not None else [128, 128]
        self.dropout, self.activation, self.loss, self.task_dim = dropout, activation, loss, task_dim
        self.images = shared.images

    def make_layers(self, spec: DataSpec) -> None:
        """Create the layers for the features of a dataset."""
        self.classes = spec[self.action_name].classes
        if self.classes is not None and self.executor.temporal_ensemble_coeff is not None:
            raise ConfigError("classes cannot be averaged; leave out temporal_ensemble_coeff for discrete actions")
        images = replace(self.images, fetch_weights=not self.is_restored)
        self.observation = ObservationEncoder(spec, self.n_obs_steps, images=images, task_dim=self.task_dim)
        widths = [self.observation.out_dim, *self.hidden]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), ACTIVATIONS[self.activation]()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
        self.net = nn.Sequential(*layers, nn.Linear(widths[-1], self.horizon * (self.classes or self.action_dim)))

    def predict(self, batch: Mapping[str, Any]) -> Tensor:
        """Return class logits or normalised actions for a batch of the data: (B, A), or (B, H, A) for chunks."""
        out = self.outputs(self.normalizer.normalize(batch))
        return out.squeeze(1) if self.horizon == 1 else out

    def outputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Return class logits (B, H, K) or normalised actions (B, H, A) from normalised observations."""
        out: Tensor = self.net(self.observation(batch))
        return out.view(out.shape[0], self.horizon, -1)

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        """Return the imitation loss over the real actions of the batch, with accuracy for discrete ones."""
        batch = self.normalizer.normalize(batch)
        target, valid_BH = self.targets(batch)
        predicted = self.outputs(batch)
        if self.classes is None:
            error = functional.mse_loss if self.loss == "mse" else functional.l1_loss
            return masked_loss(error(predicted, target, reduction="none"), valid_BH)
        target_BH = target.squeeze(-1).long()
        errors_BH = functional.cross_entropy(predicted.flatten(0, 1), target_BH.flatten(), reduction="none")
        with torch.no_grad():
            hits_BH = (predicted.argmax(-1) == target_BH) * valid_BH
        accuracy = hits_BH.sum() / valid_BH.sum()
        return masked_loss(errors_BH.view(*target_BH.shape, 1), valid_BH, metrics={"accuracy": accuracy})

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return a chunk: class indices (B, H), or normalised actions (B, H, A)."""
        predicted = self.outputs(batch)
        return predicted if self.classes is None else predicted.argmax(-1)
