"""Agents: code of the user's that asks the model as often as it likes, and says what came of it.

class Guess:
    def run(self, task, llm):
        reply = llm.complete(task.prompt, max_tokens=8)
        return float(reply.text.strip() == task.answer)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from etude.errors import ConfigError
from etude.registry import AGENT_REGISTRY, load_object, names_object
from etude.rollouts.llm import LLM
from etude.rollouts.tasks import Task
from etude.types.trajectory import Trajectory

Run = Callable[[Task, LLM], Any]


@runtime_checkable
class Agent(Protocol):
    """Works on one task with the model; a class is made anew for every rollout."""

    def run(self, task: Task, llm: LLM) -> Any:
        """Work on a task.

        Returns:
            A reward; or a text, which the reward function judges; or a mapping with `reward` or `text`, and `score`
            (names to numbers, which are logged); or a list with one of these for each turn that is learned from. None
            is the text of the last reply.
        """


def make_agent(given: Any) -> Callable[[], Run]:
    """Return what gives the function of one rollout, from a class, a function, a name or `{type, params}`.

    A name is a key of the registry, or `file.py:Name`.
    """
    params: dict[str, Any] = {}
    named: Any = given.get("type") if isinstance(given, Mapping) else given
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - {"type", "params"})
        if unknown or named is None:
            raise ConfigError(f"an agent takes type and params, got {', '.join(map(str, given))}")
        params = dict(given.get("params") or {})
    if isinstance(named, str):
        named = load_object(named, "agent") if names_object(named) else AGENT_REGISTRY.get(named)
    name = getattr(named, "__name__", type(named).__name__)
    if not inspect.isclass(named):
        run = named.run if callable(getattr(named, "run", None)) else named
        if params or not callable(run):
            raise ConfigError(f"agent {name}: a class is made with params; give one that has run(task, llm)")
        return lambda: run
    if not callable(getattr(named, "run", None)):
        raise ConfigError(f"agent {name} has no run(task, llm)")
    try:
        inspect.signature(named).bind(**params)
    except TypeError as error:
        raise ConfigError(f"agent {name}: {error}") from None
    kind: Any = named
    return lambda: kind(**params).run


@dataclass(frozen=True, slots=True)
class Told:
    """What an agent says of a rollout, or of one turn of it."""

    reward: float | None = None
    text: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


def settle(trajectories: Sequence[Trajectory], turns: Sequence[int], result: Any) -> None:
    """Write what an agent returned into the trajectories of its rollout; raise a ValueError if it makes no sense.

    Args:
        trajectories: What its turns became.
        turns: The number of the trajectory of each turn.
        result: What it returned.
    """
    if not isinstance(result, list | tuple):
        told = _read(result)
        last = trajectories[turns[-1]].text if told.text is None else told.text
        for one in trajectories:
            one.reward, one.text, one.scores = told.reward, last, dict(told.scores)
        return
    if len(result) != len(turns):
        raise ValueError(f"it returned a list of {len(result)} for {len(turns)} turns")
    for number, one in enumerate(trajectories):
        heard = [_read(item) for item, turn in zip(result, turns, strict=True) if turn == number]
        rewards = [told.reward for told in heard if told.reward is not None]
        one.reward = sum(rewards) if rewards else None
        one.text = next((told.text for told in reversed(heard) if told.text is not None), one.text)
        one.scores = {name: value for told in heard for name, value in told.scores.items()}


def _read(result: Any) -> Told:
    if result is None:
        return Told()
    if isinstance(result, str):
        return Told(text=result)
    if not isinstance(result, Mapping):
        return Told(_finite(result))
    unknown = sorted(set(result) - {"reward", "text", "score"})
    if unknown:
        raise ValueError(f"it returned a mapping with {unknown[0]!r}; reward, text and score have a meaning")
    reward, text, score = (result.get(name) for name in ("reward", "text", "score"))
    scores = {str(name): _finite(value) for name, value in (score or {}).items()}
    return Told(None if reward is None else _finite(reward), None if text is None else str(text), scores)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}")
    return number
