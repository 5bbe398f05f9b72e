"""Draw rollouts of tasks with a policy, and have them judged: completions, conversations, or what agents do.

Everything is a function of (seed, position, rollout, turn), and of the policy that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any, Literal

from etude.data.text import encode_continuation
from etude.errors import ConfigError, RolloutError
from etude.policies.language.sampling import Sampling
from etude.rng import fold
from etude.rollouts.acting import act
from etude.rollouts.agents import Run
from etude.rollouts.conversation import Conversation, add_completion, begin, hear
from etude.rollouts.measures import timed
from etude.rollouts.rewards import Rewards
from etude.rollouts.tasks import Task
from etude.rollouts.turns import Transcript, encode_prompt
from etude.types.trajectory import Trajectory

OnError = Literal["drop", "stop", "retry", "refill"]
_AGAIN = 0x52657472  # sets the draws of further attempts apart


class Drawing:
    """How rollouts are drawn and judged; which tasks are whose turn is `task_at`'s to say."""

    tasks: Sequence[Task]
    rewards: Rewards | None
    conversation: Callable[[Task], Conversation] | None
    agent: Callable[[], Run] | None
    generator: Any
    sampling: Sampling
    group_size: int
    max_turns: int
    agent_timeout_s: float | None
    chat: bool
    on_error: OnError
    retries: int
    glance: Callable[[], None] | None = None
    """Called a few times a second while agents are waited for; may raise."""
    _arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}

    def task_at(self, position: int) -> Task:
        """Return the task of a group."""
        return self.tasks[position]

    def judged(
        self, policy: Any, positions: Sequence[int], seed: int, tasks: Sequence[Task] | None = None
    ) -> list[Trajectory]:
        """Return judged rollouts; those that failed were drawn again as `on_error` says, and have no reward if in vain.

        Args:
            policy: Draws.
            positions: Names of the groups; equal ones give equal rollouts.
            seed: What else the rollouts are a function of.
            tasks: What to draw rollouts of; those at the positions unless given.
        """
        given = dict(zip(positions, map(self.task_at, positions) if tasks is None else tasks, strict=True))
        rollouts = self._tried(policy, given, seed)
        for attempt in range(1, self.retries + 1 if self.on_error in ("retry", "refill") else 1):
            failed: dict[int, list[int]] = {}
            for rollout in of_runs(rollouts):
                if rollout.reward is None:
                    failed.setdefault(int(rollout.group_id), []).append(rollout.run_id)
            if not failed:
                break
            again = {position: given[position] for position in failed}
            key = fold(seed, _AGAIN, attempt)
            if self.on_error == "retry":
                fresh = self._tried(policy, again, key, list(failed.values()))
            else:
                fresh = _into_places(self._tried(policy, again, key), failed)
            rollouts = _replaced(rollouts, fresh)
            for rollout in rollouts:
                if rollout.run_id in failed.get(int(rollout.group_id), ()):
                    rollout.tries = attempt + 1
        return rollouts

    def _tried(
        self, policy: Any, given: dict[int, Task], seed: int, runs: Sequence[Sequence[int]] | None = None
    ) -> list[Trajectory]:
        with timed(self.timings, "generate"):
            rollouts = self.draw(policy, list(given), seed, list(given.values()), runs)
        with timed(self.timings, "reward"):
            self.reward(rollouts)
        bad = next((rollout for rollout in rollouts if rollout.reward is None), None)
        if bad is not None and self.on_error == "stop":
            raise RolloutError(f"rollout {bad.run_id} of task {bad.task.id!r} failed: {bad.error}")
        return rollouts

    # ---- drawing -------------------------------------------------------------------------------------------------

    def draw(
        self,
        policy: Any,
        positions: Sequence[int],
        seed: int,
        tasks: Sequence[Task] | None = None,
        runs: Sequence[Sequence[int]] | None = None,
    ) -> list[Trajectory]:
        """Return rollouts of the tasks at some positions, without rewards unless a partner or an agent gives them.

        Args:
            policy: Draws.
            positions: Names of the groups.
            seed: What else the rollouts are a function of.
            tasks: What to draw rollouts of; those at the positions unless given.
            runs: Which rollouts of each group; all `group_size` of them unless given.
        """
        tasks = [self.task_at(position) for position in positions] if tasks is None else tasks
        keys = [fold(seed, position) >> 1 for position in positions]
        wanted = [range(self.group_size)] * len(positions) if runs is None else runs
        places = [
            (task, fold(key, run), str(position), run)
            for task, key, position, numbers in zip(tasks, keys, positions, wanted, strict=True)
            for run in numbers
        ]
        if self.agent is not None:
            return self._act(policy, self.agent, places)
        prompts = [self.encode(policy, task) for task in tasks]
        if runs is None:
            drawn = self._generate(policy, prompts, self.group_size, keys)
        else:  # each on its own: not all of a group are wanted
            lone = [prompt for prompt, numbers in zip(prompts, runs, strict=True) for _ in numbers]
            drawn = self._generate(policy, lone, 1, [key >> 1 for _, key, _, _ in places])
            prompts = lone
        rollouts = []
        heads = [prompt for prompt, completions in zip(prompts, drawn, strict=True) for _ in completions]
        completed = (completion for completions in drawn for completion in completions)
        for (task, key, group, run), head, completion in zip(places, heads, completed, strict=True):
            rollout = begin(task, head, key, group_id=group, run_id=run)
            add_completion(rollout, completion)
            rollouts.append(rollout)
        if self.conversation is not None:
            self._converse(policy, rollouts, self.conversation)
        return rollouts

    def encode(self, policy: Any, task: Task) -> list[int]:
        """Return the tokens of a task's prompt."""
        tokens = encode_prompt(policy, self._worded(task).messages or task.prompt)
        if not tokens:
            raise ConfigError(f"the prompt of task {task.id!r} is empty")
        return tokens

    def _worded(self, task: Task) -> Task:
        """Return a task as the model is to read it: as chat messages, if the data says so."""
        if not self.chat or task.messages:
            return task
        messages = ({"role": "user", "content": task.prompt},)
        return Task(task.prompt, task.answer, task.id, task.metadata, messages)

    def _generate(
        self, policy: Any, prompts: Sequence[Any], n: int, keys: Sequence[int], sampling: Sampling | None = None
    ) -> list[list[Any]]:
        maker = self.generator if self.generator is not None else policy
        with self._arithmetic():
            drawn: list[list[Any]] = maker.generate(prompts, sampling or self.sampling, n=n, keys=keys)
        if any(completion.text and not completion.tokens for group in drawn for completion in group):
            raise ConfigError(
                f"{type(maker).__name__} returns completions without the ids of their tokens, so there is nothing to "
                "train on; take a server that returns them, or leave out the generator and let the policy draw"
            )
        return drawn

    def _act(
        self, policy: Any, agent: Callable[[], Run], places: Sequence[tuple[Task, int, str, int]]
    ) -> list[Trajectory]:
        transcripts = [
            Transcript(self._worded(task), key, group_id=group, run_id=run) for task, key, group, run in places
        ]
        return act(
            agent, policy, transcripts,
            lambda prompts, keys, sampling: self._generate(policy, prompts, 1, keys, sampling), self.sampling,
            max_turns=self.max_turns, timeout_s=self.agent_timeout_s, glance=self.glance,
        )  # fmt: skip

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

    # ---- judging -------------------------------------------------------------------------------------------------

    def reward(self, rollouts: Sequence[Trajectory]) -> None:
        """Let the reward function judge rollouts; those it fails on are left without a reward.

        What an agent has rewarded itself is not judged again; turns of one rollout with one text are judged once.
        """
        judged: dict[Any, list[Trajectory]] = {}
        for rollout in rollouts:
            if rollout.error is None and (self.agent is None or rollout.reward is None):
                judged.setdefault((rollout.group_id, rollout.run_id, rollout.text), []).append(rollout)
        if self.rewards is None:
            if self.agent is not None:
                for rollout in (rollout for alike in judged.values() for rollout in alike):
                    rollout.error = "the agent returned no reward, and there is no reward function"
            return
        firsts = [alike[0] for alike in judged.values()]
        outcomes = self.rewards([rollout.task for rollout in firsts], [rollout.text for rollout in firsts])
        for alike, outcome in zip(judged.values(), outcomes, strict=True):
            for rollout in alike:
                rollout.reward = None if outcome.reward is None else (rollout.reward or 0.0) + outcome.reward
                rollout.scores = {**rollout.scores, **outcome.scores}
                rollout.error = f"the reward failed: {outcome.error}" if outcome.reward is None else None
        _fail_whole_runs(rollouts)


def paid(rollouts: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the rollouts that have a reward."""
    return [rollout for rollout in rollouts if rollout.reward is not None]


def of_runs(rollouts: Sequence[Trajectory]) -> list[Trajectory]:
    """Return one trajectory of each rollout: the last, where an agent made several."""
    return list({(rollout.group_id, rollout.run_id): rollout for rollout in rollouts}.values())


def rewards_of_runs(rollouts: Sequence[Trajectory]) -> list[float]:
    """Return the reward of each rollout: the mean of those of its turns, where an agent gave them different ones."""
    runs: dict[Any, list[float]] = {}
    for rollout in paid(rollouts):
        runs.setdefault((rollout.group_id, rollout.run_id), []).append(rollout.reward)
    return [fmean(rewards) for rewards in runs.values()]


def _fail_whole_runs(rollouts: Sequence[Trajectory]) -> None:
    """Leave no turn of a rollout to train on if another could not be judged."""
    errors = {(one.group_id, one.run_id): one.error for one in rollouts if one.error is not None}
    for one in rollouts:
        if one.error is None and (one.group_id, one.run_id) in errors:
            one.reward, one.error = None, errors[one.group_id, one.run_id]


def _replaced(rollouts: Sequence[Trajectory], fresh: Sequence[Trajectory]) -> list[Trajectory]:
    """Return rollouts with some of them drawn anew, in order."""
    names = {(one.group_id, one.run_id) for one in fresh}
    kept = [one for one in rollouts if (one.group_id, one.run_id) not in names]
    return sorted([*kept, *fresh], key=lambda one: (int(one.group_id), one.run_id))


def _into_places(fresh: Sequence[Trajectory], failed: dict[int, list[int]]) -> list[Trajectory]:
    """Let what succeeded in another try of whole groups take the places of what failed, as far as it goes."""
    runs: dict[int, dict[int, list[Trajectory]]] = {}
    for one in paid(fresh):
        runs.setdefault(int(one.group_id), {}).setdefault(one.run_id, []).append(one)
    found = []
    for position, places in failed.items():
        for place, turns in zip(places, runs.get(position, {}).values(), strict=False):
            for one in turns:
                one.run_id = place
                found.append(one)
    return found
