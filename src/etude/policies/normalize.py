"""Normalisation as part of the policy: one object goes both ways, and its numbers are saved with the weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from etude.data.named_numbers import NamedNumbers
from etude.data.statistics import NormStats, center_and_width
from etude.errors import ConfigError, DataError
from etude.policies.derived import Derivation, DerivedFeature, center_and_scale
from etude.policies.spec import condense
from etude.reading.suggest import did_you_mean
from etude.types import DataSpec, Feature

Mode = Literal["mean_std", "min_max", "quantiles", "identity", "imagenet"]
MODES: tuple[Mode, ...] = ("mean_std", "min_max", "quantiles", "identity", "imagenet")
Scaling = Mode | dict[str, Any]
"""A mode, or {scale, center, relative_to}: numbers in the data's units instead of statistics."""
_ORIGIN = "origin"
"""What the numbers that actions are said from are derived as."""
BOUNDED: tuple[Mode, ...] = ("min_max", "quantiles")
"""Modes that map (almost) everything into [-1, 1]."""
ROLE_MODES: Mapping[str, Mode] = {
    "state": "mean_std",
    "environment": "mean_std",
    "image": "imagenet",
    "text": "identity",
    "action": "mean_std",
}
"""What holds for a role where nothing else is said."""

OBSERVATION_LIMIT = 10.0
"""Normalised states are clamped here: a dimension that hardly moved in the data must not blow up on the robot."""
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


class Normalizer(nn.Module):
    """Map every feature of a spec to the scale layers like, and actions back to the data's units.

    Each mode is affine: `(value - center) / width`. The numbers are buffers, so they travel with the state dict. A
    constant dimension has width 0: it is normalised to 0, and comes back as the constant.

    Args:
        spec: The features, with statistics.
        modes: Mode by role ("state", "action", ...) or by feature name; the name wins. A mapping {scale, center}
            holds the numbers themselves, in the data's units.
        derivation: What is computed from the features before they are normalised.
        origin: Where actions are said from, if they are `relative_to` something that is observed.
    """

    def __init__(
        self,
        spec: DataSpec,
        modes: Mapping[str, str | Mapping[str, Any]] | None = None,
        derivation: Derivation | None = None,
        origin: Derivation | None = None,
    ) -> None:
        super().__init__()
        spec = condense(spec)
        self.derivation, self.origin = derivation, origin
        self.modes = resolve_modes(spec, modes or {})
        """Mode of each feature, by its name."""
        self._plan: list[tuple[str, str, str, bool]] = []
        for name, mode in self.modes.items():
            if spec[name].role == "action":
                self.action_name = name
            self._add(name, spec[name].role, *_affine(name, spec[name], mode), is_affine=mode != "identity")
        for name, (center, width) in ({} if derivation is None else derivation.affine).items():
            self._add(name, "state", center.float(), width.float())

    def _add(self, name: str, role: str, center: Tensor, width: Tensor, *, is_affine: bool = True) -> None:
        key = name.replace(".", "__")
        self._plan.append((name, key, role, is_affine))
        self.register_buffer(f"{key}__center", center)
        self.register_buffer(f"{key}__width", width)

    def normalize(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with what is derived, and every known feature normalised; uint8 images become floats."""
        out = dict(batch)
        if self.derivation is not None:
            out.update(self.derivation(batch))
        for name, key, role, is_affine in self._plan:
            if name not in out:
                continue
            center, width = self.get_buffer(f"{key}__center"), self.get_buffer(f"{key}__width")
            value = out[name]
            if role == "image" and not value.is_floating_point():
                value = value.to(center.dtype) / 255.0
            value = value.to(center.dtype)
            if role == "action" and self.origin is not None:
                value = value - self._place_of(batch, value)
            if is_affine:
                # What never changed in the data carries no news: divided by infinity it is 0, on the robot too.
                value = (value - center) / torch.where(width > 0, width, torch.inf)
            if role in ("state", "environment"):
                value = value.clamp(-OBSERVATION_LIMIT, OBSERVATION_LIMIT) if is_affine else value
            out[name] = value
        return out

    def unnormalize(self, name: str, value: Tensor) -> Tensor:
        """Return a normalised feature in the data's units."""
        key = name.replace(".", "__")
        if self.modes[name] == "identity":
            return value
        return value * self.get_buffer(f"{key}__width") + self.get_buffer(f"{key}__center")

    def unnormalize_action(self, value: Tensor, observation: Mapping[str, Any] | None = None) -> Tensor:
        """Return normalised actions in the data's units; those that are relative need what was seen."""
        if not hasattr(self, "action_name"):
            return value
        value = self.unnormalize(self.action_name, value)
        return value if self.origin is None else value + self._place_of(observation or {}, value)

    def _place_of(self, batch: Mapping[str, Any], actions: Tensor) -> Tensor:
        """Return where actions, (B, A) or (B, H, A), are said from: what was seen last, as it is in the data."""
        assert self.origin is not None
        if _ORIGIN not in (found := self.origin(batch)):
            missing = sorted(self.origin.sources - batch.keys())
            raise DataError(f"actions are relative to numbers of {', '.join(missing)}, which the batch does not have")
        place: Tensor = found[_ORIGIN]
        place = (place if place.dim() == 2 else place[:, -1]).to(actions.dtype)
        return place if actions.dim() == 2 else place.unsqueeze(1)


def resolve_modes(spec: DataSpec, modes: Mapping[str, str | Mapping[str, Any]]) -> dict[str, Scaling]:
    """Return the mode of each feature that is normalised; refuse keys and modes that mean nothing."""
    for key, mode in modes.items():
        if isinstance(mode, Mapping):
            if "scale" not in mode or mode.keys() - {"scale", "center", "relative_to"}:
                raise ConfigError(f"normalization of {key!r} is {dict(mode)}; say {{scale: NUMBER, center: NUMBER}}")
        elif mode not in MODES:
            raise ConfigError(f"normalization of {key!r} is {mode!r}; one of {', '.join(MODES)}, or {{scale: NUMBER}}")
        if key not in ROLE_MODES and key not in spec.features:
            known = [*ROLE_MODES, *spec.features]
            raise ConfigError(f"normalization names {key!r}, which is no role and no feature{did_you_mean(key, known)}")
    resolved: dict[str, Scaling] = {}
    for name, feature in spec.features.items():
        if feature.role not in ROLE_MODES or (feature.role == "action" and feature.classes is not None):
            continue  # An index has no scale.
        mode = mode_of(name, feature, modes)
        if isinstance(mode, Mapping) and "relative_to" in mode and feature.role != "action":
            raise ConfigError(f"normalization of {name} has relative_to, which is for actions; derive a difference")
        resolved[name] = dict(mode) if isinstance(mode, Mapping) else next(known for known in MODES if known == mode)
        if mode == "imagenet" and (feature.role != "image" or feature.shape[0] != 3):
            raise ConfigError(
                f"normalization 'imagenet' is for images of 3 channels, {name} has shape {feature.shape}; "
                f"set normalization: {{{name}: mean_std}}"
            )
    return resolved


def mode_of(name: str, feature: Feature, modes: Mapping[str, Any]) -> Any:
    """Return the mode that is said for a feature by its name, by its role, or by nobody."""
    return modes.get(name, modes.get(feature.role, ROLE_MODES.get(feature.role)))


def make_origin(spec: DataSpec, name: str, modes: Mapping[str, Any], n_obs_steps: int) -> Derivation | None:
    """Return how the place is found that an action is said from; None for actions that are absolute."""
    mode = mode_of(name, spec[name], modes)
    if not isinstance(mode, Mapping) or mode.get("relative_to") is None:
        return None
    where = f"relative_to in the normalization of {name}"
    named = NamedNumbers(spec).find(where, mode["relative_to"])
    if (len(named),) != tuple(spec[name].shape):
        raise ConfigError(f"{where} names {len(named)} numbers, the action has shape {tuple(spec[name].shape)}")
    recipe = DerivedFeature(scale=1.0, numbers=[f"{feature}.{index}" for feature, index in named])
    return Derivation(spec, {_ORIGIN: recipe}, n_obs_steps)


def _affine(name: str, feature: Feature, mode: Scaling) -> tuple[Tensor, Tensor]:
    """Return center and width of a feature, in float32."""
    shape = (feature.shape[0], 1, 1) if feature.role == "image" else feature.shape
    if isinstance(mode, dict):
        center, width = center_and_scale(f"the normalization of {name}", mode.get("center", 0.0), mode["scale"], shape)
        return center.float(), width.float()
    if mode == "identity":
        return torch.zeros(shape), torch.ones(shape)
    if mode == "imagenet":
        mean, std = (torch.tensor(_IMAGENET[key]).reshape(3, 1, 1) for key in ("mean", "std"))
        return mean, std
    center, width = center_and_width(name, feature.stats or {}, mode, shape)
    return center.float(), width.float()


def act_in_data_units(policy: nn.Module, statistics: NormStats, action: str = "action") -> None:
    """Let a policy that was trained on normalised batches be shown observations, and give actions, in the data's units.

    For policies that normalise inside there is nothing to do; nor for those that do not act.
    """
    if hasattr(policy, "use_statistics"):
        policy.use_statistics(statistics)  # type: ignore[operator]
        return
    for name in ("select_action", "predict_action_chunk"):
        method = getattr(policy, name, None)
        if callable(method):
            original = method.method if isinstance(method, _InDataUnits) else method
            setattr(policy, name, _InDataUnits(original, statistics, action))


class _InDataUnits:
    """A method of a policy between normalised observations and data units."""

    def __init__(self, method: Any, statistics: NormStats, action: str) -> None:
        self.method, self.statistics, self.action = method, statistics, action
        self.__signature__ = inspect.signature(method)

    def __call__(self, observation: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Normalise what is seen, and give back actions in the data's units."""
        chosen = self.method(self.statistics.normalize(observation, complete=False), *args, **kwargs)
        return self.statistics.unnormalize(self.action, chosen) if isinstance(chosen, Tensor) else chosen
