"""Text rollouts as Data: each step draws completions of prompts with the policy as it is, rewards them, and trains.

One step is one experience: `prompts_per_step` prompts with `group_size` completions each, over all ranks. Everything is
a function of (seed, step, prompt, completion), so that a resumed run draws the same completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch

from etude.algorithms.advantages import informative
from etude.data.order import Order
from etude.data.text import encode_continuation
from etude.errors import ConfigError, RolloutError
from etude.policies.language.sampling import Sampling
from etude.rng import STREAM_ROLLOUT, fold
from etude.rollouts.conversation import Conversation, add_completion, begin, hear
from etude.rollouts.measures import measure_rewards, timed
from etude.rollouts.rewards import RewardFunction, Rewards
from etude.rollouts.sources import make_generator, make_reward, make_tasks
from etude.rollouts.tasks import Task
from etude.signatures.nested import ComponentOf
from etude.types import DataSpec, Rollouts
from etude.types.protocols import Place
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.trainer import Trainer


class TextRollouts:
    """Prompts, a reward and how to draw: where the batches of a language policy come from.

    Args:
        tasks: Prompts: a list of texts or of mappings with `prompt` and `answer`, the name of a source such as
            `addition`, or `{type: name, params: {...}}`.
        reward: From (task, completion) to a reward: a function or its registered name; None asks the source.
        prompts_per_step: Prompts of one step, over all ranks.
        group_size: Completions of each prompt.
        max_new_tokens: Tokens of a completion at most.
        temperature: Divides the logits; the algorithm takes it over unless it has one of its own.
        top_p: Draw from the likeliest tokens that hold this much probability together.
        top_k: Draw from this many likeliest tokens; 0 is all.
        stop: Texts that end a completion.
        chat: Put each prompt into the model's chat template as the user's message.
        reward_timeout_s: Seconds that one call of the reward function may take, in a process of its own, which sees
            everything as it was at the first call; None calls it in place, with no limit.
        on_reward_error: What to do when the reward function fails: drop that rollout, or stop.
        conversation: Makes the partner of a conversation from a task; its turns give the reward.
        max_turns: Turns of a conversation at most.
        generator: Draws the completions instead of the policy; has `generate` and returns the ids of its tokens; its
            registered name, or `{type: endpoint, params: {url: ...}}`.
        resample: Rounds in which groups whose rewards are all equal are replaced by groups of other prompts.
    """

    spec: DataSpec | None = None

    def __init__(
        self,
        tasks: Annotated[Any, ComponentOf("tasks")],
        reward: str | RewardFunction | None = None,
        prompts_per_step: int = 4,
        group_size: int = 8,
        max_new_tokens: int = 32,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: list[str] | None = None,
        chat: bool = False,
        reward_timeout_s: float | None = 10.0,
        on_reward_error: Literal["drop", "stop"] = "drop",
        conversation: Callable[[Task], Conversation] | None = None,
        max_turns: int = 4,
        generator: Annotated[Any, ComponentOf("generators")] = None,
        resample: int = 0,
    ) -> None:
        if prompts_per_step < 1 or group_size < 1 or max_turns < 1:
            raise ConfigError("prompts_per_step, group_size and max_turns must be at least 1")
        if resample < 0 or (resample and group_size < 2):
            raise ConfigError("resample must not be negative, and needs a group_size of 2 or more to compare rewards")
        self.resample = resample
        self.tasks: Sequence[Task] = make_tasks(tasks)
        self.conversation, self.max_turns, self.chat = conversation, max_turns, chat
        self.generator = make_generator(generator)
        self.rewards = (
            None
            if conversation is not None and reward is None
            else Rewards(make_reward(reward, self.tasks), reward_timeout_s, on_reward_error)
        )
        self.prompts_per_step, self.group_size = prompts_per_step, group_size
        self.sampling = Sampling(max_new_tokens, temperature, top_p, top_k, tuple(stop or ()))
        self._arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.metrics: dict[str, tuple[float, float]] = {}
        self.timings: dict[str, float] = {}
        self.rollouts: list[Trajectory] = []
        """The rollouts of the last step, failed ones included."""

    # ---- as Data -------------------------------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Learn who draws."""
        self._trainer, self._gather = trainer, trainer.session.gather
        # Drawn as it is trained: what samples in float32 and learns in bfloat16 takes its own rounding for a ratio.
        self._arithmetic = trainer.session.precision.forward
        if self.rewards is not None:
            self.rewards.glance = trainer.session.heed_signals
            self.rewards.judge.release = trainer.session.written_tensors
        algorithm = trainer.algorithm
        if not hasattr(algorithm, "experience"):
            raise ConfigError(
                "text rollouts need an algorithm that learns from rewards, such as grpo; "
                f"got {'none' if algorithm is None else type(algorithm).__name__}"
            )
        if self.resample and getattr(algorithm, "needs_greedy", False):
            raise ConfigError("resample compares completions of a group, the algorithm with a greedy one: choose one")
        wanted = getattr(algorithm, "temperature", self.sampling.scale)
        if wanted != self.sampling.scale:
            raise ConfigError(
                f"completions are drawn at temperature {self.sampling.scale:g} but the algorithm computes their "
                f"log-probabilities at {wanted:g}; set both to the same"
            )

    def open(self, place: Place) -> None:
        """Get ready to draw one rank's share."""
        if self.prompts_per_step % place.world:
            raise ConfigError(f"{self.prompts_per_step} prompts per step cannot be shared by {place.world} ranks")
        self.place = place
        self._order = Order(len(self.tasks), seed=place.seed, shuffle=place.shuffle, version=place.order_version)

    def take(self, step: int) -> Rollouts:
        """Draw and reward the rollouts of one step."""
        policy: Any = self._trainer.policy
        with timed(self.timings, "generate"):
            self.rollouts = self.draw(policy, self._positions(step), fold(self.place.seed, STREAM_ROLLOUT, step))
        with timed(self.timings, "reward"):
            self.reward(self.rollouts)
        replaced = self._replace_equal_groups(policy, step)
        if getattr(self._trainer.algorithm, "needs_greedy", False):
            self._compare_with_greedy(policy, step)
        good = [rollout for rollout in self.rollouts if rollout.reward is not None]
        self._measure(good)
        if self.resample:
            groups = len(self._positions(step))
            self.metrics["rollout/resampled"] = (replaced / groups, float(groups))
        if not sum(self._gather(len(good))):
            reason = next((rollout.error for rollout in self.rollouts), None)
            raise RolloutError(f"all {len(self.rollouts)} rollouts of step {step} failed; the first: {reason}")
        # A rank all of whose rollouts failed goes through one of them, which weighs nothing.
        return Rollouts(good or [self._unpaid(self.rollouts[0])], are_padding=not good)

    @staticmethod
    def _unpaid(rollout: Trajectory) -> Trajectory:
        return Trajectory(rollout.tokens, rollout.loss_mask, 0.0, extra_fields=rollout.extra_fields)

    def ids(self, step: int) -> Sequence[Any]:
        """Name the tasks of a step."""
        return [[self._task(position).id for position in self._positions(step)]]

    def epochs(self, step: int) -> float:
        """Return how often every task has been seen."""
        return step * self.prompts_per_step / len(self.tasks)

    def close(self) -> None:
        """End the process of the reward function."""
        if self.rewards is not None:
            self.rewards.close()

    # ---- drawing -------------------------------------------------------------------------------------------------

    def _positions(self, step: int) -> list[int]:
        first = step * self.prompts_per_step
        return list(range(first + self.place.rank, first + self.prompts_per_step, self.place.world))

    def _task(self, position: int) -> Task:
        return self.tasks[int(self._order.at(position, 1)[0][0])]

    def draw(
        self, policy: Any, positions: Sequence[int], seed: int, tasks: Sequence[Task] | None = None
    ) -> list[Trajectory]:
        """Return rollouts of the tasks at some positions, without rewards unless a conversation gives them."""
        tasks = [self._task(position) for position in positions] if tasks is None else tasks
        prompts = [self._encode(policy, task) for task in tasks]
        keys = [fold(seed, position) >> 1 for position in positions]
        drawn = self._generate(policy, prompts, self.group_size, keys)
        rollouts = []
        for task, prompt, key, position, completions in zip(tasks, prompts, keys, positions, drawn, strict=True):
            for index, completion in enumerate(completions):
                rollout = begin(task, prompt, fold(key, index), group_id=str(position), run_id=index)
                add_completion(rollout, completion)
                rollouts.append(rollout)
        if self.conversation is not None:
            self._converse(policy, rollouts, self.conversation)
        return rollouts

    def _encode(self, policy: Any, task: Task) -> list[int]:
        if self.chat:
            tokens: list[int] = policy.encode_chat([{"role": "user", "content": task.prompt}])
        else:
            tokens = policy.encode(task.prompt)
        if not tokens:
            raise ConfigError(f"the prompt of task {task.id!r} is empty")
        return tokens

    def _generate(self, policy: Any, prompts: Sequence[Any], n: int, keys: Sequence[int]) -> list[list[Any]]:
        maker = self.generator if self.generator is not None else policy
        with self._arithmetic():
            drawn: list[list[Any]] = maker.generate(prompts, self.sampling, n=n, keys=keys)
        if any(completion.text and not completion.tokens for group in drawn for completion in group):
            raise ConfigError(
                f"{type(maker).__name__} returns completions without the ids of their tokens, so there is nothing to "
                "train on; take a server that returns them, or leave out the generator and let the policy draw"
            )
        return drawn

    def _converse(self, policy: Any, rollouts: list[Trajectory], partner: Callable[[Task], Conversation]) -> None:
        going = [(rollout, partner(rollout.task)) for rollout in rollouts]
        for rollout in rollouts:
            rollout.reward = 0.0
        for turn in range(1, self.max_turns + 1):
            going = [(one, other) for one, other in going if self._answered(policy, one, other, turn)]
            if not going:
                return
            keys = [fold(rollout.key, turn) >> 1 for rollout, _ in going]
            drawn = self._generate(policy, [rollout.tokens for rollout, _ in going], 1, keys)
            for (rollout, _), (completion,) in zip(going, drawn, strict=True):
                add_completion(rollout, completion)

    def _answered(self, policy: Any, rollout: Trajectory, partner: Conversation, turn: int) -> bool:
        """Let the partner answer; return whether the conversation goes on."""
        try:
            answer = partner.respond(rollout.text)
        except Exception as error:  # noqa: BLE001 - it is the user's code, which may fail in any way
            rollout.reward, rollout.error = None, f"{type(error).__name__}: {error}"
            return False
        rollout.reward = (rollout.reward or 0.0) + float(answer.reward)
        if answer.done or turn == self.max_turns:
            return False
        hear(rollout, encode_continuation(policy, answer.reply))
        return True

    def reward(self, rollouts: Sequence[Trajectory]) -> None:
        """Let the reward function judge rollouts; those it fails on are left without a reward."""
        if self.rewards is None:
            return
        judged = [rollout for rollout in rollouts if rollout.error is None]
        outcomes = self.rewards([rollout.task for rollout in judged], [rollout.text for rollout in judged])
        for rollout, outcome in zip(judged, outcomes, strict=True):
            failed = outcome.reward is None
            rollout.reward = None if outcome.reward is None else (rollout.reward or 0.0) + outcome.reward
            rollout.scores, rollout.error = dict(outcome.scores), outcome.error if failed else None

    def _replace_equal_groups(self, policy: Any, step: int) -> int:
        """Draw groups whose rewards are all equal anew, of other tasks; return how many were drawn.

        Which tasks is a function of (seed, step, round, position), so that a resumed run draws the same. Groups that
        are still equal after the last round stay.
        """
        drawn = 0
        for attempt in range(1, self.resample + 1):
            judged = [rollout for rollout in self.rollouts if rollout.reward is not None]
            teaches = informative(torch.tensor([r.reward for r in judged]).double(), [r.group_id for r in judged])
            lively = {rollout.group_id for rollout, good in zip(judged, teaches.tolist(), strict=True) if good}
            equal = sorted({int(rollout.group_id) for rollout in judged if rollout.group_id not in lively})
            if not equal:
                break
            seed = fold(self.place.seed, STREAM_ROLLOUT, step, attempt)
            tasks = [self.tasks[fold(seed, position) % len(self.tasks)] for position in equal]
            with timed(self.timings, "generate"):
                fresh = self.draw(policy, equal, seed, tasks)
            with timed(self.timings, "reward"):
                self.reward(fresh)
            kept = [rollout for rollout in self.rollouts if int(rollout.group_id) not in set(equal)]
            self.rollouts = sorted(kept + fresh, key=lambda rollout: (int(rollout.group_id), rollout.run_id))
            drawn += len(equal)
        return drawn

    def _compare_with_greedy(self, policy: Any, step: int) -> None:
        """Note what the greedy completion of each prompt earns; without it, a rollout cannot be compared."""
        kept, size = self.sampling, self.group_size
        self.sampling, self.group_size = replace(kept, greedy=True), 1
        try:
            with timed(self.timings, "generate"):
                greedy = self.draw(policy, self._positions(step), 0)
            with timed(self.timings, "reward"):
                self.reward(greedy)
        finally:
            self.sampling, self.group_size = kept, size
        found = {rollout.group_id: rollout for rollout in greedy}
        for rollout in self.rollouts:
            rollout.greedy_rewards = found[rollout.group_id].reward
            if rollout.greedy_rewards is None:
                rollout.greedy_rewards, rollout.reward, rollout.error = 0.0, None, found[rollout.group_id].error

    # ---- batches -------------------------------------------------------------------------------------------------

    def _measure(self, good: Sequence[Trajectory]) -> None:
        total = len(self.rollouts)
        found = {"rollout/failed": (1 - len(good) / max(1, total), float(total))}
        found |= measure_rewards((rollout.reward for rollout in good if rollout.reward is not None), self._gather)
        if good:
            count = float(len(good))
            found["rollout/tokens"] = (float(np.mean([sum(rollout.loss_mask) for rollout in good])), count)
            truncated = [rollout.finish_reason == "length" for rollout in good]
            found["rollout/truncated"] = (float(np.mean(truncated)), count)
            for name in sorted({name for rollout in good for name in rollout.scores}):
                values = [rollout.scores[name] for rollout in good if name in rollout.scores]
                found[f"score/{name}"] = (float(np.mean(values)), float(len(values)))
        self.metrics = found


def as_mapping(rollout: Trajectory) -> Mapping[str, Any]:
    """Return what is worth reading of a rollout."""
    return {
        "task": rollout.task.id, "prompt": rollout.task.prompt, "text": rollout.text, "reward": rollout.reward,
        "turns": rollout.turns, "finish_reason": rollout.finish_reason, "error": rollout.error, **rollout.scores,
    }  # fmt: skip
