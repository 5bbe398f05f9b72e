"""Sources of tasks and reward functions by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.registry import REWARD_REGISTRY, TASK_REGISTRY
from etude.rollouts.reward_shapes import as_reward
from etude.rollouts.rewards import RewardFunction
from etude.rollouts.tasks import Prompts, Task


def make_tasks(given: Any) -> Sequence[Task]:
    """Return tasks from a list of prompts, the name of a source, or `{type: name, params: {...}}`."""
    if isinstance(given, str):
        given = {"type": given}
    if isinstance(given, Mapping) and "type" in given:
        unknown = sorted(set(given) - {"type", "params"})
        if unknown:
            raise ConfigError(f"tasks has no key {unknown[0]!r}; it takes type and params")
        params = dict(given.get("params") or {})
        source = TASK_REGISTRY.get(given["type"])
        try:
            inspect.signature(source).bind(**params)
        except TypeError as error:
            raise ConfigError(f"tasks {given['type']!r}: {error}") from None
        tasks: Sequence[Task] = source(**params)
        return tasks
    if not isinstance(given, Mapping) and hasattr(given, "__len__") and hasattr(given, "__getitem__") and len(given):
        # Rows of a `datasets.Dataset` are mappings, though it is no Sequence.
        return Prompts(given) if isinstance(given[0], str | Mapping) else given
    raise ConfigError("tasks must be prompts, or the name of a source of them")


def make_reward(given: str | RewardFunction | None, tasks: Any) -> RewardFunction:
    """Return a reward function from its name or in any shape that it may have, or the one that the tasks bring."""
    if given is not None:
        found: RewardFunction = as_reward(REWARD_REGISTRY.get(given) if isinstance(given, str) else given)
        return found
    own = getattr(tasks, "score", None)
    if own is None:
        raise ConfigError("these tasks have no reward of their own; give one with `reward`")
    reward: RewardFunction = own
    return reward
