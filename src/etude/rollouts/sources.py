"""Sources of tasks and reward functions by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.registry import GENERATOR_REGISTRY, REWARD_REGISTRY, TASK_REGISTRY
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
    if isinstance(given, Sequence) and given and isinstance(given[0], str | Mapping):
        return Prompts(given)
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and len(given):
        return given  # type: ignore[no-any-return]
    raise ConfigError("tasks must be prompts, or the name of a source of them")


def make_reward(given: str | RewardFunction | None, tasks: Any) -> RewardFunction:
    """Return a reward function from its name, or the one that the tasks bring."""
    if isinstance(given, str):
        found: RewardFunction = REWARD_REGISTRY.get(given)
        return found
    if given is not None:
        return given
    own = getattr(tasks, "score", None)
    if own is None:
        raise ConfigError("these tasks have no reward of their own; give one with `reward`")
    reward: RewardFunction = own
    return reward


def make_generator(given: Any) -> Any:
    """Return what draws completions from its name or `{type: name, params: {...}}`; what is neither is one itself."""
    given = {"type": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        return given
    if "type" not in given or set(given) - {"type", "params"}:
        raise ConfigError(f"a generator is given by type and params, got {', '.join(map(str, given)) or 'nothing'}")
    make, params = GENERATOR_REGISTRY.get(given["type"]), dict(given.get("params") or {})
    try:
        inspect.signature(make).bind(**params)
    except TypeError as error:
        raise ConfigError(f"generator {given['type']!r}: {error}") from None
    return make(**params)
