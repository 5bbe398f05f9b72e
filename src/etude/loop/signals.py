"""SIGINT, SIGTERM and SIGHUP ask politely once: finish the step, save, exit with 128 + signal. Twice exits at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes a stop signal while training runs, and restores the previous handlers afterwards."""

    def __init__(self) -> None:
        self.received = 0
        self.received_s = 0.0
        """When it came, by the monotonic clock."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the training is to outlive its terminal
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_pressing(self, patience_s: float = 2.0) -> bool:
        """Tell whether a signal came so long ago that there is no more waiting."""
        return bool(self.received) and time.monotonic() - self.received_s > patience_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGHUP:
            return  # a closing terminal says so twice: the kernel to its foreground, the shell to its jobs
        if self.received:
            os._exit(128 + number)
        self.received, self.received_s = number, time.monotonic()
        name = signal.Signals(number).name
        # os.write, not print: a handler may interrupt a print that holds the stream's lock.
        with suppress(OSError, ValueError):  # the terminal may be gone
            os.write(
                sys.__stderr__.fileno() if sys.__stderr__ else 2,
                f"\netude: {name}: saving after this step; again to exit at once\n".encode(),
            )
