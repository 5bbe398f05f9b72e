"""Measure the reward on tasks that are not trained on, every so often."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from etude.callbacks import EvaluateEvery
from etude.errors import ConfigError, RolloutError
from etude.rng import STREAM_EVALUATE, fold
from etude.rollouts.drawing import of_runs, paid
from etude.rollouts.sources import keep_short
from etude.rollouts.text import TextRollouts, as_mapping
from etude.signatures.nested import ComponentOf
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from etude.trainer import Trainer


class EvaluateRewards(EvaluateEvery):
    """Draw completions of held-out tasks every so often and at the end; logged as eval/reward.

    Where the data has an agent, it works on these tasks too. The same numbers are logged as `val/reward` and
    `val/<score>`, and where tasks have a `data_source` as `val/<data_source>_reward` and so on for each of these.

    With `training.best_metric: eval/reward` and `training.best_mode: max` the best checkpoint earns the most.

    Args:
        tasks: The tasks, as `data.params.tasks` takes them.
        reward: From (task, completion) to a reward, or its registered name; None asks the tasks.
        every: How often, such as 50 or "5 min".
        limit: Tasks at most; None takes all.
        completions: Completions of each task.
        max_new_tokens: Tokens of a completion at most; the training data's unless given.
        greedy: Take the likeliest token every time; needs no more than one completion.
    """

    def __init__(
        self,
        tasks: Annotated[Any, ComponentOf("tasks")],
        reward: Any = None,
        every: int | str = 50,
        limit: int | None = None,
        completions: int = 1,
        max_new_tokens: int | None = None,
        greedy: bool = True,
    ) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"evaluate_rewards: limit must be at least 1, or null for all tasks; got {limit}")
        super().__init__(every)
        self.limit = limit
        self._given = {"tasks": tasks, "reward": reward, "group_size": completions}
        self._max_new_tokens, self._greedy = max_new_tokens, greedy
        self.measures = ("eval/reward",)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Draw as the training data does, but for what is given."""
        super().on_fit_start(trainer)
        data: Any = trainer.data
        if not isinstance(data, TextRollouts):
            raise ConfigError("evaluate_rewards goes with data of type rollouts")
        drawn = self._rollouts = TextRollouts(
            **self._given, chat=data.chat, conversation=data.conversation, max_turns=data.max_turns,
            agent=data.given_agent, agent_timeout_s=data.agent_timeout_s, on_error=data.on_error, retries=data.retries,
        )  # fmt: skip
        drawn.tasks = keep_short(drawn.tasks, lambda task: drawn.encode(trainer.policy, task), trainer.rank == 0)
        if drawn.rewards is not None:
            drawn.rewards.judge.release = trainer.session.written_tensors
        sampling = replace(data.sampling, greedy=self._greedy)
        if self._max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=self._max_new_tokens)
        self._rollouts.sampling = sampling

    def on_fit_end(self, trainer: Trainer) -> None:
        """End the process of the reward function."""
        self._rollouts.close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """End the process of the reward function."""
        if hasattr(self, "_rollouts"):
            self._rollouts.close()

    def evaluate(self, trainer: Trainer) -> Mapping[str, float]:
        """Return the mean reward of the tasks."""
        drawn = self._rollouts
        count = len(drawn.tasks) if self.limit is None else min(len(drawn.tasks), self.limit)
        tasks = [drawn.tasks[index] for index in range(count)]
        seed = fold(trainer.config.seed, STREAM_EVALUATE)
        rollouts = of_runs(drawn.collect(trainer.policy, range(count), seed, tasks))
        good = paid(rollouts)
        if not good:
            raise RolloutError(f"all {len(rollouts)} rollouts of an evaluation failed; the first: {rollouts[0].error}")
        if trainer.run is not None:
            path = trainer.run.dir / "evaluation" / f"step-{trainer.progress.step:08d}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(as_mapping(rollout)) + "\n" for rollout in rollouts))
        means = _means(good)
        found = {f"{kind}/{name}": value for kind in ("eval", "val") for name, value in means.items()}
        sources = {rollout.data_source for rollout in good} - {""}
        for source in sorted(sources):
            own = _means([rollout for rollout in good if rollout.data_source == source])
            found |= {f"val/{source}_{name}": value for name, value in own.items()}
        return found | {"val/num_samples": float(len(good))}


def _means(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean reward and the mean of each score."""
    names = sorted({name for rollout in rollouts for name in rollout.scores} - {"reward"})
    count = len(rollouts)
    found = {"reward": sum(rollout.reward for rollout in rollouts) / count}
    return found | {name: sum(rollout.scores.get(name, 0.0) for rollout in rollouts) / count for name in names}
