"""Environments with a time limit: a step that takes too long is broken off, and the environment given up."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any, NoReturn

from etude.simulation.environments.base import Array, Environment, Observation, StepOutcome

_set_handler: Any = getattr(sys.modules.get("_signal", signal), "signal")  # noqa: B009
"""`signal.signal` without its search for enum members, which takes longer than all the rest of an alarm."""
_ALARM = int(signal.SIGALRM)


class TimedEnvironment:
    """An environment whose `reset` and `step` raise `TimeoutError` when they take too long; it is useless after that.

    An alarm breaks off Python code and whatever waits, in the main thread. Elsewhere, and in a simulator that loops in
    machine code, a call that returns late fails as well, and one that never does is found by the run's own watch
    (`training.hang_timeout_s`). An alarm costs 3 us a step; a thread for each simulator cost up to 1 ms on busy cores.

    Args:
        env: The environment.
        timeout_s: Seconds that one call may take.
    """

    def __init__(self, env: Environment, timeout_s: float) -> None:
        self._env, self._timeout_s = env, timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed."""
        with _Alarm(self._timeout_s):
            return self._env.reset(seed)

    def step(self, action: Array) -> StepOutcome:
        """Act."""
        with _Alarm(self._timeout_s):
            return self._env.step(action)


class _Alarm:
    """Raise `TimeoutError` in a block that takes too long; alarms of others are put back as they were."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._began = time.monotonic()
        self._rings = threading.current_thread() is threading.main_thread()
        if self._rings:
            self._handler = _set_handler(_ALARM, self._ring)
            self._timer = signal.setitimer(signal.ITIMER_REAL, self._timeout_s)

    def __exit__(self, *error: object) -> None:
        spent_s = time.monotonic() - self._began
        if self._rings:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _set_handler(_ALARM, self._handler)
            if self._timer[0]:
                signal.setitimer(signal.ITIMER_REAL, max(self._timer[0] - spent_s, 1e-3), self._timer[1])
        if error[0] is None and spent_s > self._timeout_s:
            self._ring()

    def _ring(self, *_: object) -> NoReturn:
        raise TimeoutError(f"it took longer than {self._timeout_s:g} s")
