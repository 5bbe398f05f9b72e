"""Normalisation as LeRobot keeps it: two pipelines of steps in JSON, their statistics in safetensors beside them.

Both sides are affine. Ours divides by a width that is 0 where the data never moved; LeRobot adds a small number to a
standard deviation, and maps the lowest value of a range to -1. Statistics are written so that its formulas give our
numbers, and read so that ours give its.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.deploy.lerobot.features import TYPES, Exchanged
from etude.errors import CheckpointError, ConfigError
from etude.policies.base import PolicyModule
from etude.policies.normalize import Mode
from etude.runs.tensor_file import read_tensor_file

BEFORE, AFTER = "policy_preprocessor", "policy_postprocessor"
EPSILON = 1e-8
"""What LeRobot adds to a standard deviation, unless its JSON says otherwise."""
ENDLESS = 1e30
"""A width that makes 0 of everything, where an infinite one would make NaN of an infinite value."""
_KEYS: Mapping[str, tuple[str, str]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
}
_MODES: Mapping[str, Mode] = {
    "MEAN_STD": "mean_std", "MIN_MAX": "min_max", "QUANTILES": "quantiles", "IDENTITY": "identity"
}  # fmt: skip
_MODE_NAMES = {mode: name for name, mode in _MODES.items()} | {"imagenet": "MEAN_STD"}
_STEPS = {
    BEFORE: ("rename_observations_processor", "to_batch_processor", "device_processor", "normalizer_processor"),
    AFTER: ("unnormalizer_processor", "device_processor"),
}
"""The steps that are understood."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def norm_map(policy: PolicyModule, features: Sequence[Exchanged]) -> dict[str, str]:
    """Return LeRobot's mode of each type of feature; where ours differ within a type, the one that can say them all."""
    found: dict[str, set[str]] = {}
    for one in features:
        mode = policy.normalizer.modes[one.ours]
        # A scale of the user's is written as theirs of mean and deviation, which are divided by in the same way.
        found.setdefault(TYPES[one.role], set()).add(_MODE_NAMES[mode] if isinstance(mode, str) else "MEAN_STD")
    return {kind: modes.pop() if len(modes) == 1 else "MEAN_STD" for kind, modes in found.items()}


def make_processors(policy: PolicyModule, features: Sequence[Exchanged]) -> dict[str, Any]:
    """Return the files of both pipelines by name: JSON values, and tensors by name."""
    modes = norm_map(policy, features)
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before_state, after_state = (f"{BEFORE}_step_3_normalizer_processor", f"{AFTER}_step_0_unnormalizer_processor")

    def normalizer(name: str, some: Sequence[Exchanged], state: str) -> dict[str, Any]:
        described = {one.theirs: one.to_json() for one in some}
        config = {"eps": EPSILON, "features": described, "norm_map": modes}
        return {"registry_name": name, "config": config, "state_file": f"{state}.safetensors"}

    renamed = {one.ours: one.theirs for one in features if one.ours != one.theirs and one.role != "action"}
    actions = [one for one in features if one.role == "action"]
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": renamed}},
        {"registry_name": "to_batch_processor", "config": {}},
        device,
        normalizer("normalizer_processor", features, before_state),
    ]
    after = [normalizer("unnormalizer_processor", actions, after_state), device]
    return {
        f"{BEFORE}.json": {"name": BEFORE, "steps": before},
        f"{before_state}.safetensors": _statistics(policy, features, modes),
        f"{AFTER}.json": {"name": AFTER, "steps": after},
        f"{after_state}.safetensors": _statistics(policy, actions, modes),
    }


def _statistics(policy: PolicyModule, features: Sequence[Exchanged], modes: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for one in features:
        mode = modes[TYPES[one.role]]
        if mode == "IDENTITY":
            continue
        key = one.ours.replace(".", "__")
        center, width = (
            policy.normalizer.get_buffer(f"{key}__{part}").detach().cpu().double() for part in ("center", "width")
        )
        if one.role != "action":  # what never moved is 0 for us, whatever it is
            width = torch.where(width > 0, width, ENDLESS)
        if mode == "MEAN_STD":
            low, high = center, width if one.role == "action" else width - EPSILON
        else:
            low, high = center - width, center + width
        for name, value in zip(_KEYS[mode], (low, high), strict=True):
            tensors[f"{one.theirs}.{name}"] = value.float()
    return tensors


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureScale:
    """How one feature is normalised."""

    mode: Mode
    statistics: dict[str, Any] = field(default_factory=dict)
    center: Tensor | None = None
    width: Tensor | None = None
    """Center and width of our normaliser, that give LeRobot's numbers; None where the mode is identity."""


class Processors:
    """The two pipelines of a saved policy.

    Args:
        directory: Where they lie.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        before, after = (_read_steps(directory, name) for name in (BEFORE, AFTER))
        self.renamed: dict[str, str] = {}
        """From names in observations to names in the config."""
        for step in before:
            if step["registry_name"] == "rename_observations_processor":
                self.renamed |= step.get("config", {}).get("rename_map") or {}
        self._observed = self._normalizer(before, "normalizer_processor")
        self._acted = self._normalizer(after, "unnormalizer_processor")

    def _normalizer(self, steps: Sequence[Mapping[str, Any]], name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        found = [step for step in steps if step["registry_name"] == name]
        if len(found) != 1:
            raise CheckpointError(f"{self._directory}: there are {len(found)} steps {name!r}, where one is expected")
        file = found[0].get("state_file")
        if file is None:
            return dict(found[0].get("config", {})), {}
        path = self._directory / Path(str(file)).name
        try:
            return dict(found[0].get("config", {})), read_tensor_file(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the statistics {path}: {error}") from None

    def scale(self, one: Exchanged) -> FeatureScale:
        """Return how a feature is normalised."""
        config, tensors = self._acted if one.role == "action" else self._observed
        name = config.get("norm_map", {}).get(TYPES[one.role], "IDENTITY")
        chosen = config.get("normalize_observation_keys")
        is_left_out = one.role != "action" and chosen is not None and one.theirs not in chosen
        statistics = {
            key.removeprefix(f"{one.theirs}."): value.double()
            for key, value in tensors.items()
            if key.rpartition(".")[0] == one.theirs
        }
        if name == "IDENTITY" or is_left_out or not statistics:
            return FeatureScale("identity")
        if name not in _MODES:
            raise CheckpointError(
                f"{self._directory}: {one.theirs} is normalised by {name}, which has no counterpart here"
            )
        keys = _KEYS[name]
        if missing := [key for key in keys if key not in statistics]:
            raise CheckpointError(
                f"{self._directory}: the statistics of {one.theirs} have no {' and no '.join(missing)}"
            )
        shape = (one.shape[0], 1, 1) if one.role == "image" else one.shape
        try:
            low, high = (statistics[key].reshape(shape) for key in keys)
        except RuntimeError:
            raise CheckpointError(
                f"{self._directory}: the statistics of {one.theirs} are not of its shape {list(shape)}"
            ) from None
        epsilon = 0.0 if one.role == "action" else float(config.get("eps", EPSILON))
        center, width = _affine(name, low, high, epsilon, is_action=one.role == "action")
        lists = {key: value.reshape(shape).tolist() for key, value in zip(keys, (low, high), strict=True)}
        return FeatureScale(_MODES[name], lists, center.float(), width.float())


def _affine(mode: str, low: Tensor, high: Tensor, epsilon: float, *, is_action: bool) -> tuple[Tensor, Tensor]:
    """Return center and width that do what LeRobot does with mean and deviation, or with the ends of a range."""
    if mode == "MEAN_STD":
        return low, torch.where(high > 0, high + epsilon, 0.0)
    center, width = (low + high) / 2, (high - low) / 2
    if is_action:
        return center, width
    # An input that never moved lies at the lower end of its range, which is -1.
    still = width <= 0
    return torch.where(still, ENDLESS, center), torch.where(still, ENDLESS, width)


def _read_steps(directory: Path, name: str) -> list[dict[str, Any]]:
    path = directory / f"{name}.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {path.name}; LeRobot before 0.4 kept normalisation among the weights, which its "
            "lerobot/processor/migrate_policy_normalization.py turns into such files"
        )
    try:
        steps = json.loads(path.read_bytes())["steps"]
        kinds = [str(step.get("registry_name") or step["class"]) for step in steps]
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no pipeline of LeRobot's: {error}") from None
    for kind in kinds:
        if kind not in _STEPS[name]:
            raise CheckpointError(f"{path} has the step {kind!r}, which has no counterpart here")
    return list(steps)


def require_normalized(policy: PolicyModule) -> None:
    """Refuse a policy whose batches the training loop normalised: the statistics are not in its normaliser."""
    if "select_action" in vars(policy):
        raise ConfigError("batches of this policy were normalised by its data, which LeRobot's processors cannot say")
