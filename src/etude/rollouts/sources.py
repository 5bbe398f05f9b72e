"""Sources of tasks, reward functions and pools, by name or from a file."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from etude.errors import ConfigError, DataError
from etude.registry import REWARD_REGISTRY, TASK_REGISTRY, load_object, names_object
from etude.rollouts.pool import TrajectoryPool
from etude.rollouts.reward_shapes import as_reward
from etude.rollouts.rewards import RewardFunction
from etude.rollouts.tasks import PromptFile, Prompts, Task

log = logging.getLogger("etude")


def make_tasks(given: Any) -> Sequence[Task]:
    """Return tasks from prompts, a file of them, the name of a source, or `{type: name, params: {...}}`."""
    if isinstance(given, str):
        given = {"type": given}
    if isinstance(given, Mapping) and "type" in given:
        unknown = sorted(set(given) - {"type", "params"})
        if unknown:
            raise ConfigError(f"tasks has no key {unknown[0]!r}; it takes type and params")
        params = dict(given.get("params") or {})
        source: Any
        if names_object(given["type"]):
            source = load_object(given["type"], "tasks")
        elif TASK_REGISTRY.is_file(given["type"]):
            source = partial(PromptFile, given["type"])
        else:
            source = TASK_REGISTRY.get(given["type"])
        try:
            inspect.signature(source).bind(**params)
        except TypeError as error:
            raise ConfigError(f"tasks {given['type']!r}: {error}") from None
        tasks: Sequence[Task] = source(**params)
        return tasks
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and len(given):
        first = given[0] if not isinstance(given, Mapping) else None
        if isinstance(first, str | Mapping):  # of a list, or of a dataset
            return Prompts([given[index] for index in range(len(given))])
        if first is not None:
            return given  # type: ignore[no-any-return]
    raise ConfigError("tasks must be prompts, or the name of a source of them")


def make_reward(given: Any, tasks: Any, *, required: bool = True) -> RewardFunction | None:
    """Return a reward function from a function, an evaluator or the name of one, or the one that the tasks bring.

    Args:
        given: What is named as the reward.
        tasks: May have `score`.
        required: Whether it is an error to have none.
    """
    if isinstance(given, str):
        named = load_object(given, "reward") if names_object(given) else REWARD_REGISTRY.get(given)
        found: RewardFunction = as_reward(named, f"reward {given!r}")
        return found
    if given is not None:
        return as_reward(given)  # type: ignore[no-any-return]
    own: RewardFunction | None = getattr(tasks, "score", None)
    if own is None and required:
        raise ConfigError("these tasks have no reward of their own; give one with `reward`")
    return own


def make_pool(given: Any, group_size: int) -> TrajectoryPool | None:
    """Return a pool from its parameters; refuse one that groups of so many rollouts could never fill."""
    if isinstance(given, Mapping):
        try:
            inspect.signature(TrajectoryPool).bind(**given)
        except TypeError as error:
            raise ConfigError(f"pool: {error}") from None
        given = TrajectoryPool(**given)
    if given is None:
        return None
    if not isinstance(given, TrajectoryPool):
        raise ConfigError(f"pool takes the parameters of a TrajectoryPool, got {given!r}")
    if "group_id" in given.key_list and given.group_size > group_size:
        raise ConfigError(
            f"the pool waits for groups of {given.group_size}, but a prompt has only {group_size} rollouts (group_size)"
        )
    return given


def keep_short(tasks: Sequence[Task], encode: Callable[[Task], Sequence[int]], says: bool) -> Sequence[Task]:
    """Leave out prompts of more tokens than their source allows (`max_prompt_length`), and say how many these are."""
    most = getattr(tasks, "max_prompt_length", None)
    if most is None:
        return tasks
    kept = [task for task in tasks if len(encode(task)) <= most]
    if not kept:
        raise DataError(f"all {len(tasks)} prompts have more than {most} tokens (max_prompt_length)")
    if says and len(kept) < len(tasks):
        log.info("%d of %d prompts have more than %d tokens and are left out", len(tasks) - len(kept), len(tasks), most)
    return Prompts(kept)
