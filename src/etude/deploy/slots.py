"""A policy at work for several robots: one slot of the executor, and one stream of noise, for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from etude.errors import ConfigError, DataError
from etude.policies.executor import ActionExecutor
from etude.policies.observation import to_batch
from etude.types import DataSpec, Feature


class ActingPolicy(Protocol):
    """What can be served: a `PolicyModule`, or an `ExportedPolicy`."""

    spec: DataSpec
    executor: ActionExecutor
    action_name: str

    def looks_at(self, name: str, feature: Feature) -> bool:
        """Tell whether a feature is part of the observation."""

    def select_action(self, observation: Mapping[str, Any], slots: Sequence[int] | None = None) -> Tensor:
        """Return the action of each slot for this step."""

    def reset(self, slots: Sequence[int] | None = None) -> None:
        """Forget plans and history."""


class PolicySlots:
    """Act for independent robots; what one does never changes what another gets.

    Args:
        policy: The policy, built and loaded.
    """

    def __init__(self, policy: ActingPolicy) -> None:
        if not all(hasattr(policy, name) for name in ("spec", "executor", "select_action", "looks_at")):
            raise ConfigError(
                f"a {type(policy).__name__} cannot be served: it does not say what it sees; derive it from "
                "etude.policies.PolicyModule"
            )
        self.policy = policy
        self.wanted = {name: f for name, f in policy.spec.features.items() if policy.looks_at(name, f)}
        """The features that an observation must have."""
        self._noise: dict[int, Tensor] = {}
        self._next = 0

    def open(self) -> int:
        """Return a new slot, at the start of an episode."""
        slot, self._next = self._next, self._next + 1
        self.reset(slot)
        return slot

    def reset(self, slot: int, seed: int | None = None) -> None:
        """Start an episode; with a seed, noise is that of `torch.manual_seed(seed)`."""
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        self._noise[slot] = generator.get_state()
        self.policy.reset([slot])

    def close(self, slot: int) -> None:
        """Forget a slot."""
        self._noise.pop(slot, None)
        self.policy.reset([slot])

    def act(self, slot: int, observation: Any) -> tuple[np.ndarray, bool]:
        """Return the action of a slot for what it sees, and whether a chunk was computed for it."""
        batch = to_batch(check_observation(observation, self.wanted), self.policy.spec)
        is_due = self.policy.executor.is_due(slot)
        torch.set_rng_state(self._noise[slot])
        action = self.policy.select_action(batch, slots=[slot])[0]
        self._noise[slot] = torch.get_rng_state()
        if not bool(torch.isfinite(action).all()):
            self.policy.reset([slot])
            raise DataError("the policy made an action that is not finite; the episode of this robot was reset")
        return action.cpu().numpy(), is_due


def check_observation(observation: Any, wanted: Mapping[str, Feature]) -> dict[str, np.ndarray]:
    """Return the wanted arrays of an observation; say which is missing or does not fit."""
    if not isinstance(observation, Mapping):
        raise DataError("an observation is a map from feature names to arrays")
    if missing := [name for name in wanted if name not in observation]:
        raise DataError(f"the observation lacks {', '.join(missing)}; this policy sees {', '.join(wanted)}")
    return {name: _checked(name, observation[name], feature) for name, feature in wanted.items()}


def _checked(name: str, value: Any, feature: Feature) -> np.ndarray:
    if isinstance(value, bool | int | float):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        raise DataError(f"{name} is a {type(value).__name__}, not an array")
    shapes = [tuple(feature.shape)]
    if feature.role == "image":
        channels, height, width = feature.shape
        shapes.append((height, width, channels))
        if value.dtype != np.uint8 and value.dtype.kind != "f":
            raise DataError(f"{name} holds {value.dtype}; images are uint8")
    if feature.role == "task":
        return _checked_task(name, value, feature)
    if value.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {value.dtype}; give numbers")
    if value.shape not in shapes:
        raise DataError(f"{name} has shape {value.shape}, this policy sees {' or '.join(map(str, shapes))}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise DataError(f"{name} holds values that are not finite")
    # Wider integers than int64 are no tensor of every torch operation.
    return value.astype(np.float32) if value.dtype.kind == "u" and value.dtype != np.uint8 else value


def _checked_task(name: str, value: np.ndarray, feature: Feature) -> np.ndarray:
    classes = feature.classes or 0
    if value.size != 1 or value.dtype.kind not in "iu" or not 0 <= int(value.reshape(())) < classes:
        raise DataError(f"{name} must be one of the tasks 0 to {classes - 1}")
    return value.astype(np.int64).reshape(feature.shape)
