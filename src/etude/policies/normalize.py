"""Normalisation as part of the policy: one object goes both ways, and its numbers are saved with the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from etude.errors import ConfigError, DataError
from etude.policies.spec import condense
from etude.reading.suggest import did_you_mean
from etude.types import DataSpec, Feature

Mode = Literal["mean_std", "min_max", "quantiles", "identity", "imagenet"]
MODES: tuple[Mode, ...] = ("mean_std", "min_max", "quantiles", "identity", "imagenet")
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

WIDTH_FLOOR = 1e-6
"""A dimension narrower than this, relative to its size, is constant: its width is 0, and it becomes 0 always."""
OBSERVATION_LIMIT = 10.0
"""Normalised states are clamped here: a dimension that hardly moved in the data must not blow up on the robot."""
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_NEEDED: Mapping[Mode, tuple[str, ...]] = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "identity": (),
    "imagenet": (),
}


class Normalizer(nn.Module):
    """Map every feature of a spec to the scale layers like, and actions back to the data's units.

    Each mode is affine: `(value - center) / width`. The numbers are buffers, so they travel with the state dict. A
    constant dimension has width 0: it is normalised to 0, and comes back as the constant.

    Args:
        spec: The features, with statistics.
        modes: Mode by role ("state", "action", ...) or by feature name; the name wins.
    """

    def __init__(self, spec: DataSpec, modes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        spec = condense(spec)
        self.modes = resolve_modes(spec, modes or {})
        """Mode of each feature, by its name."""
        self._plan: list[tuple[str, str, str, bool]] = []
        for name, mode in self.modes.items():
            feature = spec[name]
            if feature.role == "action":
                self.action_name = name
            key = name.replace(".", "__")
            self._plan.append((name, key, feature.role, mode != "identity"))
            center, width = _affine(name, feature, mode)
            self.register_buffer(f"{key}__center", center)
            self.register_buffer(f"{key}__width", width)

    def normalize(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with every known feature in it normalised; uint8 images become floats first."""
        out = dict(batch)
        for name, key, role, is_affine in self._plan:
            if name not in out:
                continue
            center, width = self.get_buffer(f"{key}__center"), self.get_buffer(f"{key}__width")
            value = out[name]
            if role == "image" and not value.is_floating_point():
                value = value.to(center.dtype) / 255.0
            value = value.to(center.dtype)
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

    def unnormalize_action(self, value: Tensor) -> Tensor:
        """Return normalised actions in the data's units."""
        return self.unnormalize(self.action_name, value) if hasattr(self, "action_name") else value


def resolve_modes(spec: DataSpec, modes: Mapping[str, str]) -> dict[str, Mode]:
    """Return the mode of each feature that is normalised; refuse keys and modes that mean nothing."""
    for key, mode in modes.items():
        if mode not in MODES:
            raise ConfigError(f"normalization of {key!r} is {mode!r}; one of {', '.join(MODES)}")
        if key not in ROLE_MODES and key not in spec.features:
            known = [*ROLE_MODES, *spec.features]
            raise ConfigError(f"normalization names {key!r}, which is no role and no feature{did_you_mean(key, known)}")
    resolved: dict[str, Mode] = {}
    for name, feature in spec.features.items():
        if feature.role not in ROLE_MODES or (feature.role == "action" and feature.classes is not None):
            continue  # An index has no scale.
        mode = modes.get(name, modes.get(feature.role, ROLE_MODES[feature.role]))
        resolved[name] = next(known for known in MODES if known == mode)
        if mode == "imagenet" and (feature.role != "image" or feature.shape[0] != 3):
            raise ConfigError(
                f"normalization 'imagenet' is for images of 3 channels, {name} has shape {feature.shape}; "
                f"set normalization: {{{name}: mean_std}}"
            )
    return resolved


def _affine(name: str, feature: Feature, mode: Mode) -> tuple[Tensor, Tensor]:
    """Return center and width of a feature, in float32."""
    shape = (feature.shape[0], 1, 1) if feature.role == "image" else feature.shape
    if mode == "identity":
        return torch.zeros(shape), torch.ones(shape)
    if mode == "imagenet":
        mean, std = (torch.tensor(_IMAGENET[key]).reshape(3, 1, 1) for key in ("mean", "std"))
        return mean, std
    stats: Mapping[str, Any] = feature.stats or {}
    if missing := [key for key in _NEEDED[mode] if key not in stats]:
        raise DataError(
            f"{name} has no {' and '.join(missing)} in its statistics, which normalization {mode!r} needs; "
            f"compute the dataset's statistics or set normalization: {{{name}: identity}}"
        )
    first, second = (torch.as_tensor(stats[key], dtype=torch.float64).reshape(shape) for key in _NEEDED[mode])
    if not (first.isfinite().all() and second.isfinite().all()):
        raise DataError(f"the statistics of {name} are not finite; look for NaN or infinity in the data")
    center, width = (first, second) if mode == "mean_std" else ((first + second) / 2, (second - first) / 2)
    if (width < 0).any():
        raise DataError(f"the statistics of {name} contradict themselves: {' and '.join(_NEEDED[mode])} do not fit")
    center, width = _widen_narrow(center, width, stats)
    return center.float(), width.float()


def _widen_narrow(center: Tensor, width: Tensor, stats: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Give constant dimensions the width 0, and those that move only now and then (a gripper) their whole range."""
    narrow = width <= WIDTH_FLOOR * center.abs().clamp(min=1.0)
    if "min" not in stats or "max" not in stats:
        return center, torch.where(narrow, 0.0, width)
    low, high = (torch.as_tensor(stats[key], dtype=torch.float64).reshape(center.shape) for key in ("min", "max"))
    moves = (high - low) / 2 > WIDTH_FLOOR * center.abs().clamp(min=1.0)
    center = torch.where(narrow, (low + high) / 2, center)
    return center, torch.where(narrow, torch.where(moves, (high - low) / 2, 0.0), width)


class BatchStatistics:
    """Normalise the batches of a loop by statistics that came with the data, for policies that do not do so inside.

    Every floating-point key that is named is mapped by mean and std (or by min and max, to [-1, 1]); whole numbers and
    keys that a batch lacks stay as they are. Constant dimensions become 0, as in `Normalizer`.

    Args:
        norm_stats: `{key: {"mean": ..., "std": ...}}`, as a dataset factory returns them.
    """

    def __init__(self, norm_stats: Mapping[str, Any]) -> None:
        self.load(norm_stats)

    def load(self, norm_stats: Mapping[str, Any]) -> None:
        """Take other statistics from here on."""
        self.values: dict[str, dict[str, Tensor]] = {}
        """The statistics themselves, in float64."""
        self._affine: dict[str, tuple[Tensor, Tensor]] = {}
        for name, stats in norm_stats.items():
            if not isinstance(stats, Mapping):
                raise DataError(f"norm_stats must be {{key: {{mean, std}}}}, got {type(stats).__name__} for {name!r}")
            mode: Mode = "min_max" if "mean" not in stats and "min" in stats else "mean_std"
            known = {key: stats[key] for key in ("mean", "std", "min", "max") if stats.get(key) is not None}
            self.values[name] = {key: torch.as_tensor(value).double() for key, value in known.items()}
            if not self.values[name]:
                raise DataError(
                    f"norm_stats of {name!r} have no mean and std, but {', '.join(map(str, stats)) or 'none'}"
                )
            first = next(iter(self.values[name].values()))
            self._affine[name] = _affine(name, Feature(tuple(first.shape), stats=self.values[name]), mode)

    def normalize(self, batch: Any, *, complete: bool = True) -> Any:
        """Return the batch with every key that the statistics name normalised, on the device and in the type it has.

        Args:
            batch: Tensors by name.
            complete: Whether a batch in which nothing is named is a mistake; an observation may have nothing.
        """
        if not isinstance(batch, Mapping) or (complete and not any(name in batch for name in self._affine)):
            found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(f"norm_stats name {', '.join(self._affine)}, none of which is in the batch: {found}")
        out = dict(batch)
        for name in self._affine:
            value = out.get(name)
            if isinstance(value, Tensor) and value.is_floating_point():
                # What never changed in the data carries no news: divided by infinity it is 0.
                out[name] = self._map(name, value, lambda x, c, w: (x - c) / torch.where(w > 0, w, torch.inf))
        return out

    def unnormalize(self, name: str, value: Tensor) -> Tensor:
        """Return a normalised tensor in the data's units."""
        return self._map(name, value, lambda x, c, w: x * w + c) if name in self._affine else value

    def _map(self, name: str, value: Tensor, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        kind = torch.promote_types(value.dtype, torch.float32)
        center, width = (part.to(value.device, kind) for part in self._affine[name])
        try:
            return change(value.to(kind), center, width).to(value.dtype)
        except RuntimeError as error:
            raise DataError(
                f"norm_stats of {name!r} have shape {tuple(center.shape)}, which does not fit {tuple(value.shape)}"
            ) from error

    def differs_from(self, other: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Name the keys whose statistics are not the same."""
        return [
            name
            for name in {**self.values, **other}
            if name not in other
            or name not in self.values
            or self.values[name].keys() != other[name].keys()
            or not all(torch.equal(value, other[name][key].double()) for key, value in self.values[name].items())
        ]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the statistics as plain lists."""
        return {name: {key: value.tolist() for key, value in stats.items()} for name, stats in self.values.items()}


def act_in_data_units(policy: nn.Module, statistics: BatchStatistics, action: str = "action") -> None:
    """Let a policy that was trained on normalised batches be shown observations, and give actions, in the data's units.

    For policies that normalise inside there is nothing to do; nor for those that do not act.
    """
    for name in ("select_action", "predict_action_chunk"):
        method = getattr(policy, name, None)
        if callable(method):
            original = method.method if isinstance(method, _InDataUnits) else method
            setattr(policy, name, _InDataUnits(original, statistics, action))


class _InDataUnits:
    """A method of a policy between normalised observations and data units."""

    def __init__(self, method: Any, statistics: BatchStatistics, action: str) -> None:
        self.method, self.statistics, self.action = method, statistics, action
        self.__signature__ = inspect.signature(method)

    def __call__(self, observation: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Normalise what is seen, and give back actions in the data's units."""
        chosen = self.method(self.statistics.normalize(observation, complete=False), *args, **kwargs)
        return self.statistics.unnormalize(self.action, chosen) if isinstance(chosen, Tensor) else chosen
