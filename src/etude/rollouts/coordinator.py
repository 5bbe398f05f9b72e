"""Agents side by side: each in a thread, their questions answered together, level by level.

Nothing is answered before every agent that is still going has either asked or ended, and then all questions at once, in
the order of the agents: which thread was faster changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import one_line
from etude.rollouts.judge import GLANCE_S

Ask = Callable[[Any], Any]
"""Hands a question over and returns the answer; raises it if it is an exception."""
Answer = Callable[[list[tuple[int, Any]]], Sequence[Any]]
"""From the numbers of agents and what they ask to the answers; an exception is raised in its agent alone."""


@dataclass(frozen=True)
class Ended:
    """How an agent ended."""

    result: Any = None
    error: str | None = None


class GivenUpError(BaseException):
    """Raised in an agent that nobody waits for any more; no Exception, so that it is not caught by mistake."""


def run_together(
    works: Sequence[Callable[[Ask], Any]],
    answer: Answer,
    timeout_s: float | None = None,
    glance: Callable[[], None] | None = None,
) -> list[Ended]:
    """Run functions side by side, answer what they ask, and return how each ended.

    Args:
        works: What to run; each is given the function to ask with.
        answer: Called in this thread with what is asked on each level.
        timeout_s: Seconds that each may take by itself, waiting for answers not counted; None is no limit.
        glance: Called a few times a second while waiting; may raise.
    """
    changed = threading.Condition()
    agents = [_Agent(number, work, changed) for number, work in enumerate(works)]
    try:
        for agent in agents:
            agent.start()
        while asking := _next_level(agents, changed, timeout_s, glance):
            answers = answer([(agent.number, agent.question) for agent in asking])
            for agent, found in zip(asking, answers, strict=True):
                agent.go_on(found)
    finally:
        for agent in agents:
            agent.give_up()
    return [agent.ended or Ended(error="it did not end") for agent in agents]


def _next_level(
    agents: Sequence[_Agent],
    changed: threading.Condition,
    timeout_s: float | None,
    glance: Callable[[], None] | None,
) -> list[_Agent]:
    """Wait until no agent is busy, and return those that ask."""
    while True:
        with changed:
            busy = [agent for agent in agents if agent.is_busy]
            if not busy:
                return [agent for agent in agents if agent.ended is None]
            changed.wait(GLANCE_S)
        if glance is not None:
            glance()
        if timeout_s is not None:
            for agent in busy:
                agent.stop_after(timeout_s)


class _Agent(threading.Thread):
    def __init__(self, number: int, work: Callable[[Ask], Any], changed: threading.Condition) -> None:
        super().__init__(daemon=True, name=f"etude-agent-{number}")
        self.number, self._work, self._changed = number, work, changed
        self.is_busy = True
        self.question: Any = None
        self.ended: Ended | None = None
        self._answer: Any = None
        self._answered = threading.Event()
        self._given_up = False
        self._spent_s, self._since_s = 0.0, time.monotonic()

    def run(self) -> None:
        try:
            ended = Ended(self._work(self._ask))
        except GivenUpError as error:
            ended = Ended(error=one_line(error))
        except BaseException as error:  # noqa: BLE001 - it is the user's code, which may fail in any way
            ended = Ended(error=f"{type(error).__name__}: {error}")
        with self._changed:
            self.ended = self.ended or ended
            self.is_busy = False
            self._changed.notify()

    def _ask(self, question: Any) -> Any:
        if threading.current_thread() is not self:
            raise RuntimeError("an agent asks from its own thread, one completion after the other")
        with self._changed:
            if self._given_up:
                raise GivenUpError("nobody waits for it any more")
            self.question, self.is_busy = question, False
            self._spent_s += time.monotonic() - self._since_s
            self._answered.clear()
            self._changed.notify()
        self._answered.wait()
        if self._given_up:
            raise GivenUpError("nobody waits for it any more")
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def go_on(self, found: Any) -> None:
        """Hand the answer over."""
        with self._changed:
            self._answer, self.is_busy, self._since_s = found, True, time.monotonic()
            self._answered.set()

    def stop_after(self, timeout_s: float) -> None:
        """Give up on an agent that has been busy for too long; its thread ends when it asks next."""
        with self._changed:
            if self.is_busy and self._spent_s + time.monotonic() - self._since_s > timeout_s:
                self.ended = self.ended or Ended(error=f"it took longer than {timeout_s:g} s")
                self.is_busy, self._given_up = False, True

    def give_up(self) -> None:
        """Let an agent that still asks end."""
        with self._changed:
            self._given_up = True
            self._answered.set()
