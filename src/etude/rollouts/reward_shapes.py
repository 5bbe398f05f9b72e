"""The shapes that a reward may have: our functions, those that users of TRL write, evaluators, several with weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.rollouts.evaluators import EvaluatorReward
from etude.rollouts.tasks import Task

COLUMNS = frozenset({"prompts", "completions"})
"""Parameters by which a function for whole batches is known."""


def as_reward(given: Any, what: str = "the reward") -> Any:
    """Return a reward function of one task and one completion; refuse what cannot be called as one.

    A class is made without arguments first. What has `evaluate(data, target)` is an evaluator. A function with a
    parameter named `prompts` or `completions`, or with nothing but `**columns`, is of TRL's shape. Any other is called
    as `function(task, text)`.
    """
    if isinstance(given, type):
        try:
            given = given()
        except TypeError as error:
            raise ConfigError(f"{what}: {given.__name__} must be made without arguments: {error}") from None
    if callable(getattr(given, "evaluate", None)):
        return EvaluatorReward(given)
    if not callable(given):
        raise ConfigError(f"{what} must be a function of (task, text) or have evaluate(data, target), got {given!r}")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # written in C, which says nothing of its parameters
        return given
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if kinds.keys() & COLUMNS or set(kinds.values()) == {inspect.Parameter.VAR_KEYWORD}:
        return ColumnReward(given, signature)
    try:
        signature.bind(None, "")
    except TypeError:
        raise ConfigError(
            f"{what} {name_of(given)}{signature} cannot be called: a reward takes (task, text), "
            "or (prompts, completions, **columns) as in TRL"
        ) from None
    return given


def name_of(function: Any) -> str:
    """Return what a function is called in logs and messages."""
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


class ColumnReward:
    """A function `(prompts, completions, **columns) -> list of rewards` as a function of one task and one completion.

    It is called with lists of one item, by name: the prompt, the completion, the answer where there is one, and what
    else the task's row holds. A function that names its columns gets those alone.
    """

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self.function, self.__name__ = function, name_of(function)
        self._names = list(signature.parameters)
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())

    def __call__(self, task: Task, text: str) -> float:
        """Return the one reward; one that is None does not apply, and is not a number."""
        columns = {"answer": task.answer, **task.metadata, "prompts": task.prompt, "completions": text}
        wanted = columns if self._takes_all else {name: columns[name] for name in self._names if name in columns}
        found = list(self.function(**{name: [value] for name, value in wanted.items()}))
        if len(found) != 1:
            raise ValueError(f"{self.__name__} returned {len(found)} rewards for 1 completion")
        return float("nan") if found[0] is None else float(found[0])


class WeighedRewards:
    """Several reward functions as one: their weighed sum, with what each gave as a score by its name.

    As in TRL, one that does not apply to a completion (NaN, or None of a function of TRL's shape) adds nothing.
    """

    __name__ = "weighed_rewards"

    def __init__(self, functions: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        self.functions = [as_reward(function) for function in functions]
        self.weights = [1.0] * len(self.functions) if weights is None else [float(weight) for weight in weights]
        if not self.functions or len(self.weights) != len(self.functions):
            raise ConfigError(f"{len(self.functions)} reward functions cannot have {len(self.weights)} weights")
        named = [name_of(function) for function in self.functions]
        twice = {name for name in named if named.count(name) > 1}
        self.names = [f"{name}_{place}" if name in twice else name for place, name in enumerate(named)]

    def __call__(self, task: Task, text: str) -> Mapping[str, float]:
        """Return the sum as `reward`, and the parts by name."""
        scores: dict[str, float] = {}
        total, applied = 0.0, False
        for name, function, weight in zip(self.names, self.functions, self.weights, strict=True):
            found = function(task, text)
            parts = dict(found) if isinstance(found, Mapping) else {"reward": found}
            reward = float(parts.pop("reward"))
            scores |= {str(key): float(value) for key, value in parts.items()}
            if not math.isnan(reward):
                scores[name], applied = reward, True
                total += weight * reward
        return {**scores, "reward": total if applied else float("nan")}
