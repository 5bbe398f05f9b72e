"""Evaluators: rewards as objects that compare what a rollout came to with what is known of its task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.rollouts.tasks import Task


@dataclass
class EvaluationRunResult:
    """What an evaluator makes of one rollout."""

    reward: float = 0.0
    ground_truth: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further scores, which are logged by their names."""
    extra_info: dict[str, Any] = field(default_factory=dict)


class EvaluationTarget(str):
    """What a rollout came to: a text, which evaluators of NexRL ask for its `final_answer`."""

    __slots__ = ()

    @property
    def final_answer(self) -> str:
        """The text itself."""
        return str(self)


class Evaluator(ABC):
    """Rewards rollouts; made once, without arguments, in the process that judges."""

    @abstractmethod
    def evaluate(self, data: Mapping[str, Any], target: EvaluationTarget) -> EvaluationRunResult:
        """Judge what a rollout came to.

        Args:
            data: The task as a mapping: `prompt`, `answer`, `ground_truth` (the answer again), `id`, and whatever
                other columns its file has.
            target: The last text of the rollout.
        """


class EvaluatorReward:
    """An evaluator as a reward function."""

    def __init__(self, evaluator: Any) -> None:
        self.evaluator = evaluator

    def __call__(self, task: Task, text: str) -> Mapping[str, float]:
        """Return reward and metrics."""
        known = {"prompt": task.prompt, "answer": task.answer, "ground_truth": task.answer, "id": task.id}
        found = self.evaluator.evaluate({**task.metadata, **known}, EvaluationTarget(text))
        if isinstance(found, Mapping):
            found = EvaluationRunResult(**found)
        return {**found.metrics, "reward": found.reward}
