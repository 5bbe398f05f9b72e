"""Derived features: what the layers of a policy see beside the data's own numbers, computed inside the policy.

Shape letters: B batch, T observation steps, F numbers of a feature.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from etude.data.named_numbers import NamedNumbers
from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean
from etude.types import DataSpec, Feature

OPERATIONS = ("numbers", "difference", "distance", "velocity")
_PAIRS = ("difference", "distance")


@dataclass(frozen=True)
class DerivedFeature:
    """A feature computed from named numbers of the data, in the data's units, and its physical scale.

    One of `numbers`, `difference`, `distance` and `velocity` says how. Numbers are said by the names that the data
    gives them, with * and ? as in file names (`hand_?`), several in a list, or as `feature.name` and `feature.index`.
    """

    scale: float | list[float]
    """What becomes 1, in the data's units: one for all numbers of the feature, or one for each."""
    numbers: str | list[str] | None = None
    """These numbers as they are."""
    difference: list[Any] | None = None
    """Two groups of as many numbers: the first less the second."""
    distance: list[Any] | None = None
    """Two groups of as many numbers: how far the two points lie apart, one number."""
    velocity: str | list[str] | None = None
    """By how much these numbers changed since the observation before; needs n_obs_steps of 2 or more."""
    center: float | list[float] = 0.0
    """What becomes 0, in the data's units."""

    @classmethod
    def of(cls, name: str, recipe: Any) -> DerivedFeature:
        """Make one of parameters by name; refuse what means nothing, in a sentence that says where."""
        where, known = f"the derived feature {name!r}", list(inspect.signature(cls).parameters)
        if not isinstance(recipe, Mapping):
            raise ConfigError(f"{where} is {recipe!r}; say how it is computed: {{difference: [A, B], scale: 0.1}}")
        if unknown := [key for key in recipe if key not in known]:
            near = did_you_mean(str(unknown[0]), known)
            raise ConfigError(f"{where} takes {', '.join(known)}, and not {unknown[0]!r}{near}")
        said = [key for key in OPERATIONS if recipe.get(key) is not None]
        if len(said) != 1:
            found = f"it says {' and '.join(said)}" if said else "it says none"
            raise ConfigError(f"{where} needs exactly one of {', '.join(OPERATIONS)}; {found}")
        if "scale" not in recipe:
            raise ConfigError(f"{where} has no scale; say what becomes 1, in the data's units, such as scale: 0.1")
        if said[0] in _PAIRS and not (isinstance(recipe[said[0]], list | tuple) and len(recipe[said[0]]) == 2):
            raise ConfigError(f"{where}: {said[0]} takes two groups of numbers, [ONE, OTHER], got {recipe[said[0]]!r}")
        return cls(**recipe)

    @property
    def operation(self) -> str:
        """How it is computed."""
        return next(key for key in OPERATIONS if getattr(self, key) is not None)

    @property
    def groups(self) -> list[Any]:
        """The numbers it is computed from: one group, or two."""
        said = getattr(self, self.operation)
        return list(said) if self.operation in _PAIRS else [said]


class Derivation(nn.Module):
    """Compute derived features from a batch in the data's units.

    Args:
        spec: The features of the data.
        recipes: How each is computed, by its name.
        n_obs_steps: Observations in a row that batches hold.
    """

    def __init__(self, spec: DataSpec, recipes: Mapping[str, DerivedFeature], n_obs_steps: int = 1) -> None:
        super().__init__()
        self.features: dict[str, Feature] = {}
        """What is derived, as further features of the data."""
        self.affine: dict[str, tuple[Tensor, Tensor]] = {}
        """Center and width of each, in the data's units."""
        self.sources: set[str] = set()
        """The features of the data that something is computed from."""
        self._plan: list[tuple[str, str, list[list[tuple[str, str]]]]] = []
        known = NamedNumbers(spec)
        for name, recipe in recipes.items():
            if name in spec.features:
                raise ConfigError(
                    f"the derived feature {name!r} has the name of a feature of the data; give it another"
                )
            self._add(name, recipe, known, n_obs_steps)

    def _add(self, name: str, recipe: DerivedFeature, known: NamedNumbers, n_obs_steps: int) -> None:
        where, operation = f"the derived feature {name!r}", recipe.operation
        if operation == "velocity" and n_obs_steps < 2:
            raise ConfigError(f"{where} is a velocity, which takes two observations; set n_obs_steps to 2 or more")
        groups = [known.find(where, group) for group in recipe.groups]
        if len({len(group) for group in groups}) > 1:
            counts = " and ".join(str(len(group)) for group in groups)
            raise ConfigError(f"{where} compares {counts} numbers; a {operation} takes as many of both")
        width = 1 if operation == "distance" else len(groups[0])
        self.features[name] = Feature((width,), "float32", "state")
        self.affine[name] = center_and_scale(where, recipe.center, recipe.scale, (width,))
        self._plan.append((name, operation, [self._select(group) for group in groups]))

    def _select(self, group: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
        """Keep which numbers a group has, in runs of one feature, as buffers that follow the policy's device."""
        runs: list[tuple[str, list[int]]] = []
        for feature, index in group:
            if not runs or runs[-1][0] != feature:
                runs.append((feature, []))
            runs[-1][1].append(index)
            self.sources.add(feature)
        keys = []
        for feature, indices in runs:
            key = f"index_{len(list(self.buffers()))}"
            self.register_buffer(key, torch.tensor(indices), persistent=False)
            keys.append((feature, key))
        return keys

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the derived features of a batch, (B, F) or (B, T, F), in the data's units."""
        found = {}
        for name, operation, groups in self._plan:
            if any(feature not in batch for group in groups for feature, _ in group):
                continue
            values = [self._take(batch, group) for group in groups]
            value = values[0] if len(values) == 1 else values[0] - values[1]
            if operation == "distance":
                value = value.square().sum(-1, keepdim=True).sqrt()
            elif operation == "velocity":  # before the oldest observation nothing was seen to change
                value = torch.cat([torch.zeros_like(value[..., :1, :]), value[..., 1:, :] - value[..., :-1, :]], -2)
            found[name] = value
        return found

    def _take(self, batch: Mapping[str, Any], group: Sequence[tuple[str, str]]) -> Tensor:
        parts = []
        for feature, key in group:
            value = batch[feature]
            value = value if value.is_floating_point() else value.float()
            parts.append(value.index_select(-1, self.get_buffer(key)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def choose_features(
    spec: DataSpec, derived: Mapping[str, Feature], observed: Sequence[str] | None
) -> dict[str, Feature]:
    """Return what the layers see and do: all features and what is derived, or those of them that are observed."""
    known = {**spec.features, **derived}
    if observed is None:
        return known
    if not observed:
        raise ConfigError(f"observed is empty: layers have to see something (there are {', '.join(known)})")
    for name in observed:
        if name not in known:
            there = f"(there are {', '.join(known)}){did_you_mean(name, known)}"
            raise ConfigError(f"observed names {name!r}, which is no feature {there}")
    return {name: one for name, one in known.items() if name in observed or one.role == "action"}


def center_and_scale(where: str, center: Any, scale: Any, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return a center and a scale in the data's units as tensors of a shape; refuse what cannot be divided by."""
    found = []
    for name, value in (("center", center), ("scale", scale)):
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
            raise ConfigError(f"the {name} of {where} is {value!r}; it takes a number, or one for each dimension")
        if not all(math.isfinite(number) for number in numbers) or (name == "scale" and min(numbers) <= 0):
            asked = "finite and above 0" if name == "scale" else "finite"
            raise ConfigError(f"the {name} of {where} is {value!r}; it must be {asked}")
        if isinstance(value, list | tuple) and len(numbers) != math.prod(shape):
            raise ConfigError(f"the {name} of {where} has {len(numbers)} numbers, the feature has {math.prod(shape)}")
        tensor = torch.tensor(numbers, dtype=torch.float64)
        found.append((tensor.expand(math.prod(shape)) if len(numbers) == 1 else tensor).reshape(tuple(shape)).clone())
    return found[0], found[1]
