"""A frozen imitation policy and a learned correction: reinforcement that begins where imitation ended.

Shape letters: B batch, A action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from etude.errors import CheckpointError, ConfigError
from etude.policies import pretrained
from etude.policies.base import PolicyModule
from etude.policies.normalize import Mode
from etude.policies.soft_actor_critic import Seen, SoftActorCritic
from etude.runs.checkpoint import acting_weights
from etude.runs.directory import Run
from etude.types import DataSpec

AROUND = "base.action"
"""Where a normalised observation holds what the base would do."""


class ResidualPolicy(SoftActorCritic):
    """Correct what a frozen policy does by up to `scale`, with a soft actor-critic.

    The base is asked anew at every step, for the first action of a chunk. It is saved with the correction, which
    normalises observations as the base does.

    Args:
        base: The imitation policy: a run, a checkpoint or a folder written by save_pretrained.
        scale: Largest correction in each dimension; 1 is half the range of the action.
        hidden: Width of each hidden layer, of the actor and of the critics.
        activation: relu, gelu, silu or tanh, of the actor.
        critics: How many critics there are.
        layer_norm: Whether the hidden layers of critics are normalised.
        std: Deviation of corrections before training, in units of the scale and before squashing.
        temperature: What a nat of entropy is worth before training.
        task_dim: Width of the embedding of a task, where there are several.
        normalization: Mode by role (state, environment, action) or feature name: mean_std, min_max, quantiles,
            identity. Observations are normalised as by the base unless given.
    """

    default_normalization = {}

    def __init__(
        self,
        base: str | dict[str, Any],
        scale: float = 0.3,
        hidden: list[int] | None = None,
        activation: str = "relu",
        critics: int = 5,
        layer_norm: bool = True,
        std: float = 0.5,
        temperature: float = 0.1,
        task_dim: int = 32,
        normalization: dict[str, Mode] | None = None,
    ) -> None:
        super().__init__(hidden, activation, critics, layer_norm, std, temperature, task_dim, normalization)
        if not 0 < scale <= 2:
            raise ConfigError(f"scale of ResidualPolicy is the largest correction, above 0 and at most 2; got {scale}")
        self.scale = scale
        found = _load(base)
        if found.n_obs_steps > 1:
            raise ConfigError(
                f"ResidualPolicy corrects policies that look at one observation; {type(found).__name__} looks at "
                f"{found.n_obs_steps}"
            )
        if found.noise_shape is not None:
            raise ConfigError(
                f"ResidualPolicy corrects policies that always do the same, and {type(found).__name__} draws noise"
            )
        self.base = found.requires_grad_(False).eval()
        self._params["base"] = self.base.describe()  # the path may be gone when the policy is loaded

    def build(self, spec: DataSpec) -> None:
        """Create the layers; observations have the statistics of the base, unless their mode was given."""
        known, modes = self.base.spec.features, self.base.normalizer.modes
        features = dict(spec.features)
        for name, mode in modes.items():
            if name not in features or features[name].role == "action":
                continue
            if not self._given & {name, features[name].role}:
                self.normalization = {**self.normalization, name: mode}
                features[name] = replace(features[name], stats=known[name].stats)
        super().build(DataSpec(features, spec.fps))

    def make_layers(self, spec: DataSpec) -> None:
        """Create the layers of the correction; refuse a base that sees or does something else."""
        known = self.base.spec.features
        for name, feature in known.items():
            if not (self.base.looks_at(name, feature) or feature.role == "action"):
                continue
            if name not in spec.features or tuple(spec[name].shape) != tuple(feature.shape):
                here = list(spec[name].shape) if name in spec.features else "not there"
                raise ConfigError(
                    f"the base of ResidualPolicy was trained with {name} {list(feature.shape)}, which is {here}"
                )
        super().make_layers(spec)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the correction; the base stays as it is."""
        super().train(mode)
        self.base.eval()
        return self

    @torch.no_grad()
    def _ask_base(self, observation: Mapping[str, Any]) -> Tensor:
        base = self.base
        seen = base.observations(observation)
        chunk = base.sample_actions(base.normalize_observation(seen))
        first = base.unnormalize_action(chunk[:, :1].reshape(-1, *self.action_shape), seen)
        found: Tensor = self.normalizer.normalize({self.action_name: first})[self.action_name]
        return found.reshape(found.shape[0], -1).clamp(-1.0, 1.0)

    def normalize_observation(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation as the layers take it, with what the base would do."""
        return {**super().normalize_observation(observation), AROUND: self._ask_base(observation)}

    def _look(self, normal: Mapping[str, Any]) -> Seen:
        return Seen(self.observation(normal), normal[AROUND])

    def _place(self, squashed_BA: Tensor, seen: Seen) -> Tensor:
        assert seen.around is not None
        return (seen.around + self.scale * squashed_BA).clamp(-1.0, 1.0)


def _load(base: str | Mapping[str, Any]) -> PolicyModule:
    """Return the policy that is corrected, from a path or, with weights that are still to come, from a description."""
    if isinstance(base, Mapping):
        return pretrained.from_description(PolicyModule, base, "the description of the base")
    path = Path(base)
    if not (path / "checkpoints").is_dir():
        found: PolicyModule = pretrained.load(PolicyModule, path)
        return found
    tree = Run(path).choose_checkpoint()[0].tree
    if "session" not in tree or "policy" not in tree["session"]:
        raise CheckpointError(f"{path} does not say which policy it holds, so it cannot be corrected")
    policy = pretrained.from_description(PolicyModule, tree["session"]["policy"], str(path))
    policy.load_state_dict(acting_weights(tree))
    return policy
