"""Plans for a robot that moves: chunks are computed beside the loop, and take over where time has got to meanwhile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from etude.deploy.lanes import Call, Lane
from etude.deploy.latency import Latency
from etude.deploy.slots import check_observation
from etude.errors import ConfigError, NonFiniteError
from etude.policies.observation import to_batch
from etude.rng import STREAM_ROLLOUT, fold, seed_everything

_SLOT = 0
_RECENT = 20
"""Chunks whose times tell how long the next will take."""
_PROMPT = 0.5
"""Share of the budget within which a chunk is worth waiting for, and need not be begun ahead."""


class ChunkPlanner:
    """Turns a policy's chunks into one action a step, and asks for the next chunk in time.

    A policy that answers within half the budget is asked at the step that wants its chunk, as in evaluation. A slower
    one is asked some steps ahead, while actions of the chunk before are left; of what it answers, the past is dropped.

    Args:
        policy: Has `spec`, `executor`, `looks_at` and `predict_action_chunk`: a built policy, or an exported one.
        lane: Where chunks are computed.
        period_s: Time of a step.
        budget_s: Time within a step by which its action must be there.
        lead: Steps ahead that a chunk is asked for; None measures what is needed.
        seed: Root of the noise of generative policies.
        task: What is to be done, for policies that were trained on several tasks.
    """

    def __init__(
        self,
        policy: Any,
        lane: Lane,
        *,
        period_s: float,
        budget_s: float,
        lead: int | None = None,
        seed: int = 0,
        task: str | None = None,
    ) -> None:
        require_chunks(policy)
        self.policy, self._lane, self._period_s, self._budget_s = policy, lane, period_s, budget_s
        self._executor = policy.executor
        if lead is not None and not 0 <= lead < self._executor.horizon:
            raise ConfigError(
                f"--lead must be below the {self._executor.horizon} actions of a chunk, and not negative; got {lead}"
            )
        self._fixed_lead, self._seed = lead, seed
        self.wanted = {name: one for name, one in policy.spec.features.items() if policy.looks_at(name, one)}
        """The features that an observation must have."""
        self._given = self._tasks(task)
        self.latency = Latency()
        self.chunks_too_late = 0
        """Chunks of which nothing was left when they were there."""
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self.is_late = False
        """Whether the last step went on with a plan that was to be replaced by then."""
        self._episode = self._number = self._step = self._asked_step = self._asked_lead = self._plan_step = 0
        self._pending: Call | None = None
        self._batch: dict[str, Any] = {}

    @property
    def lead(self) -> int:
        """Steps ahead that the next chunk is asked for."""
        if self._fixed_lead is not None:
            return self._fixed_lead
        slowest_s = max(self._recent_s, default=0.0)
        if slowest_s <= _PROMPT * self._budget_s:
            return 0
        return int(min(math.ceil(slowest_s / self._period_s) + 1, self._executor.horizon - 1))

    @property
    def covers_s(self) -> float:
        """For how long the actions of a chunk last."""
        return float(self._executor.horizon * self._period_s)

    def begin(self, episode: int) -> None:
        """Forget plans and history: an episode begins."""
        self._executor.reset([_SLOT])
        self._episode, self._number, self._step, self._pending, self._batch = episode, 0, 0, None, {}
        self._asked_step = self._plan_step = 0

    def see(self, observation: Mapping[str, Any] | None) -> None:
        """Take what is seen at this step, if anything; take over a chunk that is there, and ask for one that is due."""
        if observation is not None:
            checked = check_observation({**observation, **self._given}, self.wanted)
            self._batch = to_batch(checked, self.policy.spec)
        if self._batch:  # what was seen last stands for a step at which nothing was
            self._executor.observe(_SLOT, {name: value[0] for name, value in self._batch.items()})
        self._collect(-math.inf)
        if self._pending is None and self._batch and self._executor.until_due(_SLOT) <= self.lead:
            self._ask()

    def prepare(self, until_s: float) -> bool:
        """Wait for a chunk that was asked for, before the robot moves; tell whether it is there."""
        self._collect(until_s)
        return self._pending is None

    def warm_up(self) -> Call:
        """Start a chunk for what was seen last, to be thrown away: the first one of a process is a slow one."""
        return self._lane.start("predict", self._prediction())

    def relearn(self, seconds: float) -> None:
        """Take this for the time of a chunk, and forget those before."""
        self._recent_s.clear()
        self._recent_s.append(seconds)
        self.latency = Latency()

    def action(self, until_s: float) -> np.ndarray | None:
        """Return the action of this step and go on to the next; None if there is none by then."""
        is_expected = self._step - self._asked_step >= self._asked_lead or not self._executor.planned(_SLOT)
        if is_expected:
            self._collect(until_s)
        # Asked for `lead` steps before it is due, or at once where that is past, a chunk has `lead` steps to come.
        self.is_late = self._step - self._plan_step >= max(self._executor.n_action_steps, 2 * self._asked_lead)
        return self.skip(1)

    def skip(self, steps: int) -> np.ndarray | None:
        """Let steps pass, and return the action of the last."""
        action = None
        for _ in range(steps):
            action = self._executor.next_action(_SLOT) if self._executor.planned(_SLOT) else None
            self._step += 1
        return None if action is None else action.cpu().numpy()

    def _ask(self) -> None:
        self._asked_step, self._asked_lead = self._step, self.lead
        self._pending = self._lane.start("predict", self._prediction())

    def _prediction(self) -> Any:
        if self._executor.observation_steps is None:
            batch = self._batch
        else:
            batch = {name: value.unsqueeze(0) for name, value in self._executor.window(_SLOT).items()}
        key = fold(self._seed, STREAM_ROLLOUT, self._episode, self._number)
        self._number += 1

        def predict() -> Any:
            seed_everything(key)
            return self.policy.predict_action_chunk(batch)[0].cpu()

        return predict

    def _collect(self, until_s: float) -> None:
        """Take over the chunk that was asked for, if it is there by then."""
        call = self._pending
        if call is None or not call.wait(until_s):
            return
        self._pending = None
        chunk = call.result()
        self._recent_s.append(call.seconds)
        self.latency.add(1e3 * call.seconds)
        if chunk.is_floating_point() and not bool(torch.isfinite(chunk).all()):
            raise NonFiniteError(f"{type(self.policy).__name__} planned actions that are not finite; none was sent")
        elapsed = self._step - self._asked_step
        if elapsed >= len(chunk):
            self.chunks_too_late += 1
            return
        self._executor.deliver(_SLOT, chunk, elapsed)
        self._plan_step = self._asked_step

    def _tasks(self, task: str | None) -> dict[str, np.ndarray]:
        given = {}
        for name, feature in self.wanted.items():
            if feature.role != "task":
                continue
            known = list(feature.names or ())
            if task in known:
                given[name] = np.asarray(known.index(task))
            elif task is not None and task.isdecimal() and int(task) < (feature.classes or 0):
                given[name] = np.asarray(int(task))
            else:
                listed = ", ".join(map(repr, known)) or f"0 to {(feature.classes or 0) - 1}"
                raise ConfigError(
                    f"the policy was trained on several tasks, and not on {task!r}; --task is one of {listed}"
                )
        return given


def require_chunks(policy: Any) -> None:
    """Refuse what does not say what it sees, or makes no chunks."""
    if not all(hasattr(policy, part) for part in ("spec", "executor", "looks_at", "predict_action_chunk")):
        raise ConfigError(
            f"a {type(policy).__name__} cannot drive a robot: it does not say what it sees; derive it from "
            "etude.policies.PolicyModule"
        )
