"""Reward functions of the user's, run so that none of them can stop or hang a run by surprise."""

from __future__ import annotations

import logging
import math
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from etude.errors import RolloutError, one_line
from etude.rng import fold
from etude.rollouts.judge import EndedError, Judge, UnsentError
from etude.rollouts.tasks import Task

log = logging.getLogger("etude")

RewardFunction = Callable[[Task, str], float | Mapping[str, float]]
"""From a task and a completion to a reward, or to a mapping with `reward` and other scores to log."""

MOST_HUNG = 8
"""Calls that may hang one after the other before the run ends."""


@dataclass(frozen=True)
class Outcome:
    """What a reward function made of one completion."""

    reward: float | None
    """None if it failed."""
    scores: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


class Rewards:
    """Calls a reward function on completions, each within a time limit.

    With a limit it runs in a process of its own (see `Judge`), which is killed and replaced when a call takes too long.
    Where that cannot be, because CUDA is in use or the tasks cannot be sent, a thread is given up instead: that does
    not help against a call that hangs inside C, and is said once.

    Args:
        function: The reward function.
        timeout_s: Seconds that one call may take; None calls it in place, with no limit.
        on_error: What to do when it raises, returns no finite number, takes too long or ends its process: drop that
            rollout, or stop.
    """

    glance: Callable[[], None] | None = None
    """Called a few times a second while a call is waited for; may raise."""
    random: Any = random
    """Whose `getrandbits` says where a function that draws begins."""

    def __init__(
        self, function: RewardFunction, timeout_s: float | None = 10.0, on_error: Literal["drop", "stop"] = "drop"
    ) -> None:
        self.function, self.timeout_s, self.on_error = function, timeout_s, on_error
        self._hung = 0
        self.judge = Judge(self._judge)
        self._in_threads = False

    def __call__(self, tasks: Sequence[Task], texts: Sequence[str]) -> list[Outcome]:
        """Return an outcome for each completion."""
        items = list(zip(tasks, texts, strict=True))
        if self.timeout_s is None:
            outcomes = [self._judge(*item) for item in items]
        else:
            outcomes = self._watched(items, self.timeout_s)
        if self.on_error == "stop":
            for (task, text), outcome in zip(items, outcomes, strict=True):
                if outcome.error is not None:
                    raise RolloutError(f"the reward of task {task.id!r} failed on {text[:80]!r}: {outcome.error}")
        return outcomes

    def _judge(self, task: Task, text: str) -> Outcome:
        try:
            found: Any = self.function(task, text)
        except Exception as error:  # noqa: BLE001 - it is the user's code, which may fail in any way
            return Outcome(None, error=_said(error))
        scores = dict(found) if isinstance(found, Mapping) else {"reward": found}
        if "reward" not in scores:
            return Outcome(None, error=f"it returned no 'reward', but {', '.join(map(repr, scores)) or 'nothing'}")
        numbers: dict[str, float] = {}
        for name, value in scores.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers is the last of these
                which = "" if name == "reward" else f" as {name!r}"
                return Outcome(None, error=f"it returned {value!r:.80}{which}, which is no number")
        reward = numbers.pop("reward")
        if not math.isfinite(reward):
            return Outcome(None, error=f"it returned {reward}")
        return Outcome(reward, numbers)

    def _watched(self, items: Sequence[tuple[Task, str]], timeout_s: float) -> list[Outcome]:
        """Work the items off elsewhere; one that takes too long is given up together with whoever works on it."""
        outcomes: list[Outcome] = []
        seed = self.random.getrandbits(62)  # so that a function that draws draws the same in a resumed run
        while len(outcomes) < len(items):
            before, rest = len(outcomes), items[len(outcomes) :]
            error = self._in_process(rest, outcomes, timeout_s, fold(seed, before))
            if len(outcomes) > before and not self._in_threads:  # a thread that hangs stays
                self._hung = 0
            if error is not None:
                outcomes.append(Outcome(None, error=error))
                self._count_hung(timeout_s)
        return outcomes

    def _in_process(
        self, items: Sequence[tuple[Task, str]], outcomes: list[Outcome], timeout_s: float, seed: int
    ) -> str | None:
        """Add the outcomes up to one that there is none of, and return why."""
        if not self._in_threads and _uses_cuda():
            self._explain_threads("CUDA is in use, which does not survive a fork")
        if not self._in_threads:
            try:
                for outcome in self.judge.call(items, timeout_s, seed, self.glance):
                    outcomes.append(outcome)  # one by one: those before a failure stay
            except (TimeoutError, EndedError) as error:
                return str(error)
            except UnsentError as error:
                self._explain_threads(f"a task cannot be sent to it: {error}")
            return None
        work = _Work(self._judge, items)
        work.start()
        found = work.wait(timeout_s)
        outcomes += found
        return None if len(found) == len(items) else f"it took longer than {timeout_s:g} s"

    def _explain_threads(self, reason: str) -> None:
        self._in_threads = True
        log.warning(
            "the reward function gets no process of its own (%s): a call that hangs inside C cannot be ended", reason
        )

    def _count_hung(self, timeout_s: float) -> None:
        self._hung += 1
        if self._hung > MOST_HUNG:
            raise RolloutError(
                f"the reward function took longer than {timeout_s:g} s, or ended its process, on {self._hung} rollouts "
                "in a row; mend it, or give it more time with reward_timeout_s"
            )

    def get_ready(self) -> None:
        """Start the process now, if there is to be one."""
        if self.timeout_s is not None and not self._in_threads and not _uses_cuda():
            with suppress(TimeoutError, EOFError, ConnectionError):  # the first call tries again, and says why
                self.judge.start()

    def close(self) -> None:
        """End the process, if there is one."""
        self.judge.close()


class _Work(threading.Thread):
    """Judges items one after the other, until done or given up."""

    def __init__(self, judge: Callable[[Task, str], Outcome], items: Sequence[tuple[Task, str]]) -> None:
        super().__init__(daemon=True, name="etude-reward")
        self._judge, self._items = judge, items
        self._outcomes: list[Outcome] = []
        self._began = time.monotonic()
        self._given_up = False
        self._changed = threading.Event()

    def run(self) -> None:
        for item in self._items:
            self._began = time.monotonic()
            outcome = self._judge(*item)
            if self._given_up:
                return
            self._outcomes.append(outcome)
        self._changed.set()

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Return the outcomes: all of them, or those before an item that took too long."""
        while True:
            done, began = len(self._outcomes), self._began
            if self._changed.wait(max(0.0, began + timeout_s - time.monotonic()) + 0.001):
                return self._outcomes
            if len(self._outcomes) == done and self._began == began and time.monotonic() - began >= timeout_s:
                self._given_up = True
                return self._outcomes[:done]


def _said(error: Exception) -> str:
    """Return what a function of the user's raised, and where: among thousands of rollouts nobody sees a traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call of it
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{place}"


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def exact_match(task: Any, text: str) -> float:
    """Return 1 if the completion is the answer, but for space around it."""
    return float(text.strip() == str(task.answer).strip())


def contains_answer(task: Any, text: str) -> float:
    """Return 1 if the answer occurs in the completion."""
    return float(str(task.answer).strip() in text)
