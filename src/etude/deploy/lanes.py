"""Time, and calls that may take too long: what a control loop waits for, so that nothing can hold it up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float:
        """Return the time."""

    def sleep_until(self, at_s: float) -> None:
        """Return at a time, or at once if it has passed."""


class Call(Protocol):
    """A call under way."""

    what: str
    started_s: float

    def wait(self, until_s: float) -> bool:
        """Wait for its end until a time, and tell whether it has ended."""

    def result(self) -> Any:
        """Return what came of it, or raise what went wrong; only after its end."""

    @property
    def seconds(self) -> float:
        """How long it took; only after its end."""


class Lane(Protocol):
    """Runs calls one after the other, beside the loop."""

    def start(self, what: str, function: Callable[[], Any]) -> Call:
        """Start a call; `what` names it in messages."""


class SystemClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def sleep_until(self, at_s: float) -> None:
        """Return at a time, or at once if it has passed."""
        left_s = at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class ThreadCall:
    """A call in the thread of a `ThreadLane`."""

    def __init__(self, what: str, function: Callable[[], Any]) -> None:
        self.what, self._function = what, function
        self.started_s = time.monotonic()
        self._began_s = self._ended_s = self.started_s
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, in the lane's thread."""
        self._began_s = time.monotonic()
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the call is waited for
            self._error = error
        self._ended_s = time.monotonic()
        self._ended.set()

    def wait(self, until_s: float) -> bool:
        """Wait for its end until a time, and tell whether it has ended."""
        return self._ended.wait(max(0.0, until_s - time.monotonic()))

    def result(self) -> Any:
        """Return what came of it, or raise what went wrong."""
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def seconds(self) -> float:
        """How long it took, without the time that it waited for its turn."""
        return self._ended_s - self._began_s


class ThreadLane:
    """One thread that is not waited for when the program ends: a call that hangs keeps nobody."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self, what: str, function: Callable[[], Any]) -> ThreadCall:
        """Start a call, after those that were started before."""
        call = ThreadCall(what, function)
        self._waiting.put(call)
        return call

    def close(self) -> None:
        """Let the thread end after what it is doing."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call.run()
            del call  # or its result would be kept until the next one comes
