"""Environments with a time limit: a step that takes too long is broken off, and the environment given up."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from typing import Any

from etude.simulation.environments.base import Array, Environment, Observation, StepOutcome

_signal: Any = sys.modules.get("_signal", signal)
"""`signal` without its search for enum members, which takes longer than all the rest of an alarm."""
_ALARM = int(signal.SIGALRM)


class TimedEnvironment:
    """An environment whose `reset` and `step` raise `TimeoutError` when they take too long; it is useless after that.

    An alarm breaks off Python code and whatever waits, in the main thread. Elsewhere, and in a simulator that loops in
    machine code, a call that returns late fails as well, and one that never does is found by the run's own watch
    (`training.hang_timeout_s`). A thread for each simulator cost up to 1 ms a step on busy cores.

    Args:
        env: The environment.
        timeout_s: Seconds that one call may take.
    """

    def __init__(self, env: Environment, timeout_s: float) -> None:
        self._env, self._limit = env, _Limit(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed."""
        with self._limit:
            return self._env.reset(seed)

    def step(self, action: Array) -> StepOutcome:
        """Act."""
        with self._limit:
            return self._env.step(action)

    def close(self) -> None:
        """Release what the simulator holds, and the alarm."""
        _alarm.take_down()
        self._env.close()


class _Alarm:
    """The alarm of this process, which stays set from one call to the next.

    Set and taken down at each, it cost up to 40 us a step on busy cores. When it rings in a call that has time left it
    is set again for the rest, and between calls it is taken down. Where others have use for alarms, each call sets its
    own and puts theirs back. (Who sets one between two calls and then puts our handler back has stopped ours: a call
    that hangs within the next `timeout_s` is left to the run's own watch.)
    """

    def __init__(self) -> None:
        self.deadline = math.inf
        """When the call that is under way has taken too long; never, between calls."""
        self.timeout_s = math.inf
        self._rings_at = -math.inf
        """When ours rings; long ago where none is set."""
        self._handler = self._ring  # one object, to be known again

    def is_set(self, now: float) -> bool:
        """Tell whether it will ring before the deadline, which is to come."""
        return now < self._rings_at <= self.deadline and _signal.getsignal(_ALARM) is self._handler

    def set(self, now: float) -> tuple[Any, tuple[float, float]] | None:
        """Set it for the deadline; return handler and timer of others, which are to be put back."""
        handler = _signal.signal(_ALARM, self._handler)
        timer = signal.setitimer(signal.ITIMER_REAL, max(self.deadline - now, 1e-3))
        self._rings_at = self.deadline
        is_free = handler is self._handler or (handler == _signal.SIG_DFL and not timer[0])
        return None if is_free else (handler, timer)

    def put_back(self, theirs: tuple[Any, tuple[float, float]], spent_s: float) -> None:
        """Leave the alarm to others, as it would be without us."""
        handler, (left_s, every_s) = theirs
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._rings_at = -math.inf
        _signal.signal(_ALARM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - spent_s, 1e-3), every_s)

    def take_down(self) -> None:
        """Leave nothing of it, unless a call is under way."""
        is_here = threading.current_thread() is threading.main_thread()
        if is_here and math.isinf(self.deadline) and _signal.getsignal(_ALARM) is self._handler:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _signal.signal(_ALARM, _signal.SIG_DFL)
            self._rings_at = -math.inf

    def forget(self) -> None:
        """Leave nothing of it in a process that was forked: timers stay with the first one."""
        self.deadline = math.inf
        self.take_down()

    def _ring(self, *_: object) -> None:
        now = time.monotonic()
        is_ours = -math.inf < self._rings_at <= now
        if now >= self.deadline:
            self.deadline = math.inf
            self.take_down()
            raise TimeoutError(_too_long(self.timeout_s))
        if not math.isinf(self.deadline):
            self.set(now)
            return
        self.take_down()
        if not is_ours:
            os.kill(os.getpid(), _ALARM)  # of somebody who wants what it does where nobody handles it


_alarm = _Alarm()
atexit.register(_alarm.take_down)
os.register_at_fork(after_in_child=_alarm.forget)


class _Limit:
    """Raise `TimeoutError` in a block that takes too long."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._began = now = time.monotonic()
        self._theirs: tuple[Any, tuple[float, float]] | None = None
        self._rings = threading.current_thread() is threading.main_thread()
        if self._rings:
            self._outer = _alarm.deadline, _alarm.timeout_s
            _alarm.deadline, _alarm.timeout_s = now + self._timeout_s, self._timeout_s
            if not _alarm.is_set(now):
                self._theirs = _alarm.set(now)

    def __exit__(self, *error: object) -> None:
        spent_s = time.monotonic() - self._began
        if self._rings:
            _alarm.deadline, _alarm.timeout_s = self._outer
            if self._theirs is not None:
                _alarm.put_back(self._theirs, spent_s)
        if error[0] is None and spent_s > self._timeout_s:
            raise TimeoutError(_too_long(self._timeout_s))


def _too_long(timeout_s: float) -> str:
    return f"it took longer than {timeout_s:g} s"
