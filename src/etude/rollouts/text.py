"""Text rollouts as Data: each step draws completions of prompts with the policy as it is, rewards them, and trains.

One step is one experience: `prompts_per_step` prompts with `group_size` completions each, over all ranks, or what a
pool makes of several such draws. Everything is a function of (seed, draw, prompt, completion), so that a resumed run
draws the same completions; what waits in a pool is part of the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from etude.data.order import Order
from etude.errors import ConfigError, RolloutError
from etude.policies.language.sampling import Sampling
from etude.rng import STREAM_ROLLOUT, fold, seed_everything
from etude.rollouts.agents import make_agent
from etude.rollouts.ahead import Ahead
from etude.rollouts.conversation import Conversation, begin
from etude.rollouts.drawing import Drawing, OnError, of_runs, paid, rewards_of_runs
from etude.rollouts.measures import measure_rewards
from etude.rollouts.pool import TrajectoryPool
from etude.rollouts.replacing import compare_with_greedy, replace_equal_groups
from etude.rollouts.rewards import Rewards
from etude.rollouts.sources import keep_short, make_generator, make_pool, make_reward, make_tasks
from etude.rollouts.tasks import Task
from etude.signatures.nested import ComponentOf, ParametersOf
from etude.types import DataSpec, Rollouts
from etude.types.protocols import Place
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from etude.trainer import Trainer

log = logging.getLogger("etude")

_SPARE_DRAWS = 8
"""Draws beyond those that fill a batch, and times as many as these, before a pool that does not fill ends the run."""


class TextRollouts(Drawing):
    """Prompts, a reward and how to draw: where the batches of a language policy come from.

    Args:
        tasks: Prompts: a list of texts or of mappings with `prompt` and `answer`, the name of a source such as
            `addition`, `{type: name, params: {...}}`, or a file of prompts (.jsonl, .csv, .parquet).
        reward: From (task, completion) to a reward: a function, an evaluator, its registered name or `file.py:name`;
            None asks the source, and then the agent.
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
        on_reward_error: What to do when the reward function fails: what `on_error` says (drop), or stop.
        conversation: Makes the partner of a conversation from a task; its turns give the reward.
        max_turns: Turns of a conversation at most, and completions that one agent may ask for.
        generator: Draws the completions instead of the policy; has `generate` and returns the ids of its tokens; its
            registered name, or `{type: endpoint, params: {url: ...}}`.
        resample: Rounds in which groups whose rewards are all equal are replaced by groups of other prompts.
        agent: Works on each task instead of one completion: a class with `run(task, llm)` or such a function, its
            registered name, `file.py:Name`, or `{type: name, params: {...}}`.
        agent_timeout_s: Seconds that an agent may take by itself, completions not counted; None is no limit.
        on_error: What becomes of a rollout that fails: drop it, stop the run, retry it, or refill its group from
            another try of the whole group.
        retries: Further tries at most.
        pool: Lets rollouts wait until there are enough: `{batch_size: 64, group_size: 8, key_list: [group_id]}`.
        ahead: 1 draws the rollouts of a step while the one before it trains, with weights that are one version old.
    """

    spec: DataSpec | None = None

    def __init__(
        self,
        tasks: Annotated[Any, ComponentOf("tasks")],
        reward: Any = None,
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
        agent: Annotated[Any, ComponentOf("agents")] = None,
        agent_timeout_s: float | None = 60.0,
        on_error: OnError = "drop",
        retries: int = 2,
        pool: Annotated[Any, ParametersOf("etude.rollouts.pool:TrajectoryPool")] = None,
        ahead: Literal[0, 1] = 0,
    ) -> None:
        super().__init__()
        if prompts_per_step < 1 or group_size < 1 or max_turns < 1 or retries < 0:
            raise ConfigError("prompts_per_step, group_size and max_turns must be at least 1, retries at least 0")
        if resample < 0 or (resample and group_size < 2):
            raise ConfigError("resample must not be negative, and needs a group_size of 2 or more to compare rewards")
        if agent is not None and conversation is not None:
            raise ConfigError("an agent leads its own conversations: give either agent or conversation")
        if ahead not in (0, 1):
            raise ConfigError(f"ahead must be 0, or 1 to draw one step ahead; got {ahead!r}")
        if ahead and pool is not None:
            raise ConfigError("ahead: 1 draws what the next step trains on, which with a pool is not known; choose one")
        self.resample = resample
        self._ahead = Ahead(self) if ahead else None
        self.tasks = make_tasks(tasks)
        self.conversation, self.max_turns, self.chat = conversation, max_turns, chat
        self.generator = make_generator(generator)
        self.given_agent, self.agent_timeout_s = agent, agent_timeout_s
        self.agent = None if agent is None else make_agent(agent)
        self.on_error, self.retries = on_error, retries
        judges = make_reward(reward, self.tasks, required=conversation is None and agent is None)
        if conversation is not None and reward is None:
            judges = None
        stops: Literal["drop", "stop"] = "stop" if "stop" in (on_reward_error, on_error) else "drop"
        self.rewards = None if judges is None else Rewards(judges, reward_timeout_s, stops)
        self.prompts_per_step, self.group_size = prompts_per_step, group_size
        self.sampling = Sampling(max_new_tokens, temperature, top_p, top_k, tuple(stop or ()))
        self.pool: TrajectoryPool | None = make_pool(pool, group_size)
        self._drawn: int | None = None
        """Draws that went into the pool so far; None before the first."""
        self.metrics: dict[str, tuple[float, float]] = {}
        self.rollouts: list[Trajectory] = []
        """The rollouts that were drawn for the last step, failed ones included."""

    # ---- as Data -------------------------------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Learn who draws."""
        self._trainer, self._gather = trainer, trainer.session.gather
        # Drawn as it is trained: what samples in float32 and learns in bfloat16 takes its own rounding for a ratio.
        self._arithmetic = trainer.session.precision.forward
        self.glance = trainer.session.heed_signals
        if self.rewards is not None:
            self.rewards.glance = trainer.session.heed_signals
            self.rewards.judge.release = trainer.session.written_tensors
        if self.pool is not None:
            self.pool.gather = trainer.session.gather
        self.tasks = keep_short(self.tasks, lambda task: self.encode(trainer.policy, task), self.place.rank == 0)
        self._lay_out()
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
        if self._ahead is not None:
            self._ahead.attach(trainer)

    @property
    def is_ahead(self) -> bool:
        """Whether rollouts are drawn with weights that are one version old."""
        return self._ahead is not None

    def open(self, place: Place) -> None:
        """Get ready to draw one rank's share."""
        if self.prompts_per_step % place.world:
            raise ConfigError(f"{self.prompts_per_step} prompts per step cannot be shared by {place.world} ranks")
        keys = () if self.pool is None else self.pool.key_list
        if place.world > 1 and keys and "group_id" not in keys:
            raise ConfigError(
                f"a pool of {place.world} ranks needs group_id among its key_list ({', '.join(keys)}): only the "
                "rollouts of one prompt in one draw stay on one rank"
            )
        self.place = place
        self._lay_out()

    def _lay_out(self) -> None:
        place = self.place
        self._order = Order(len(self.tasks), seed=place.seed, shuffle=place.shuffle, version=place.order_version)

    def take(self, step: int) -> Rollouts:
        """Draw and reward the rollouts of one step, or take those that were drawn while the step before trained."""
        if self.pool is None:
            replaced = self.collect(step) if self._ahead is None else self._ahead.take(step)
            self._require_any(self.rollouts, step)
            good = paid(self.rollouts)
        else:
            good, replaced = self._take_from(self.pool, step)
        self._measure(good, replaced)
        # A rank that has none goes through one, which weighs nothing.
        return Rollouts(good or [self._spare(step)], are_padding=not good)

    def collect(self, step: int, policy: Any = None) -> int:
        """Draw and reward the rollouts of one step with a policy, the trained one unless given.

        They are in `rollouts` then; what is returned is how many groups were replaced. With a pool, what is counted are
        draws, of which a step may take several or none.
        """
        policy = self._trainer.policy if policy is None else policy
        positions, seed = self._positions(step), (self.place.seed, STREAM_ROLLOUT, step)
        rollouts = self.judged(policy, positions, fold(*seed))
        self.rollouts, replaced = replace_equal_groups(self, policy, rollouts, self.resample, *seed)
        if getattr(self._trainer.algorithm, "needs_greedy", False):
            compare_with_greedy(self, policy, self.rollouts, positions)
        for rollout in self.rollouts:
            rollout.score = rollout.scores  # as trainers of recipes know it
        return replaced

    def _require_any(self, rollouts: Sequence[Trajectory], step: int) -> None:
        if not sum(self._gather(len(paid(rollouts)))):
            reason = next((rollout.error for rollout in rollouts), None)
            raise RolloutError(f"all {len(of_runs(rollouts))} rollouts of step {step} failed; the first: {reason}")

    def _take_from(self, pool: TrajectoryPool, step: int) -> tuple[list[Trajectory], int]:
        """Draw until the pool has a batch; return it, and how many groups were replaced."""
        drawn: list[Trajectory] = []
        draws = replaced = 0
        number = step if self._drawn is None else self._drawn
        most = _SPARE_DRAWS * (1 + pool.batch_size // (self.prompts_per_step * self.group_size))
        while not pool.is_ready(finished=True):
            if draws >= most:
                raise RolloutError(
                    f"the pool has no batch of {pool.batch_size} after {draws} draws for step {step}; {len(pool)} "
                    f"rollouts wait in groups of fewer than {pool.group_size}: see group_size and key_list"
                )
            self._seed(number)
            replaced += self.collect(number)
            self._require_any(self.rollouts, step)
            good = paid(self.rollouts)
            for index, rollout in enumerate(good):
                pool.put_trajectory(rollout, (number, int(rollout.group_id), rollout.run_id, index))
            if "group_id" in pool.key_list:  # no other draw adds to these
                pool.close_groups(good)
            drawn += self.rollouts
            draws, number = draws + 1, number + 1
            self._drawn = number  # with the pool: a signal may have both saved before the next draw is done
        self.rollouts = drawn
        self._seed(step)
        return pool.get_trajectories(finished=True), replaced

    def _seed(self, number: int) -> None:
        """Begin the global generators, which rewards may draw from, as the session does for a step."""
        seed_everything(fold(self.place.seed, STREAM_ROLLOUT, number, self.place.rank))

    def _spare(self, step: int) -> Trajectory:
        """Return a rollout of which nothing was sampled, for a rank that has no other."""
        position = self._positions(step)[0]
        prompt = self.encode(self._trainer.policy, self.task_at(position))
        spare = begin(self.task_at(position), prompt, 0, group_id=str(position), run_id=0)
        spare.reward, spare.score, spare.greedy_rewards = 0.0, {}, 0.0
        return spare

    def ids(self, step: int) -> Sequence[Any]:
        """Name the tasks of a step."""
        if self.pool is not None:
            return [[rollout.task_id for rollout in of_runs(self.rollouts)]]
        return [[self.task_at(position).id for position in self._positions(step)]]

    def epochs(self, step: int) -> float:
        """Return how often every task has been seen; with a pool, if no rollout fails."""
        prompts: float = self.prompts_per_step
        if self.pool is not None and self.pool.ready != "loaded_batch_finished":
            prompts = self.pool.batch_size / self.group_size
            if self.pool.ready != "batch_size_reached":
                prompts = -(-prompts // self.prompts_per_step) * self.prompts_per_step
        return step * prompts / len(self.tasks)

    def state_dict(self) -> dict[str, Any]:
        """Return what waits, in a pool or for the next step; ranks call together."""
        if self._ahead is not None:
            return {"ahead": self._ahead.state_dict()}
        return {} if self.pool is None else {"pool": self.pool.state_dict(), "drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what waited, however many ranks there were."""
        self._drawn = state.get("drawn")
        if self._ahead is not None:
            self._ahead.load_state_dict(state.get("ahead", {}))
        if self.pool is not None and "pool" in state:
            rank, world = self.place.rank, self.place.world
            self.pool.load_state_dict(state["pool"], is_own=lambda one: int(one.group_id) % world == rank)
        elif self.pool is None and state.get("pool", {}).get("waiting"):
            log.warning(
                "%d rollouts waited in a pool, which there is none of now: they are left out",
                len(state["pool"]["waiting"]),
            )

    def close(self) -> None:
        """End the thread that draws ahead, and the process of the reward function."""
        if self._ahead is not None:
            self._ahead.close()
        if self.rewards is not None:
            self.rewards.close()

    def _positions(self, step: int) -> list[int]:
        first = step * self.prompts_per_step
        return list(range(first + self.place.rank, first + self.prompts_per_step, self.place.world))

    def task_at(self, position: int) -> Task:
        """Return the task of the group at a position in the order of all steps."""
        return self.tasks[int(self._order.at(position, 1)[0][0])]

    def _measure(self, good: Sequence[Trajectory], replaced: int) -> None:
        drawn, taught = of_runs(self.rollouts), of_runs(good)
        total = len(drawn)
        found = {"rollout/failed": (1 - len(paid(drawn)) / max(1, total) if total else 0.0, float(total))}
        if self.on_error in ("retry", "refill"):
            found["rollout/retried"] = (sum(one.tries - 1 for one in drawn) / max(1, total), float(total))
        if self.resample:
            groups = len({rollout.group_id for rollout in drawn})
            found["rollout/resampled"] = (replaced / max(1, groups), float(groups))
        if self._ahead is not None:
            found["rollout/age"] = (float(self._ahead.age), 1.0)
        if self.pool is not None:
            found["rollout/waiting"] = (float(len(self.pool) * self.place.world), 1.0)
        found |= measure_rewards(rewards_of_runs(good), self._gather)
        if good:
            count = float(len(good))
            found["rollout/tokens"] = (float(np.mean([sum(rollout.loss_mask) for rollout in good])), count)
            truncated = [rollout.finish_reason == "length" for rollout in good]
            found["rollout/truncated"] = (float(np.mean(truncated)), count)
            for name in sorted({name for rollout in taught for name in rollout.scores}):
                values = [rollout.scores[name] for rollout in taught if name in rollout.scores]
                found[f"score/{name}"] = (float(np.mean(values)), float(len(values)))
        self.metrics = found


def as_mapping(rollout: Trajectory) -> Mapping[str, Any]:
    """Return what is worth reading of a rollout."""
    return {
        "task": rollout.task.id, "prompt": rollout.task.prompt, "text": rollout.text, "reward": rollout.reward,
        "turns": rollout.turns, "finish_reason": rollout.finish_reason, "error": rollout.error, **rollout.scores,
    }  # fmt: skip
