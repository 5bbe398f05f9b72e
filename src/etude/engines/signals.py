"""SIGINT and SIGTERM ask politely once: finish the step, save, exit with 128 + signal. The second exits at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)


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
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received, self.received_s = number, time.monotonic()
        name = signal.Signals(number).name
        # os.write, not print: a handler may interrupt a print that holds the stream's lock.
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            f"\netude: {name}: saving after this step; again to exit at once\n".encode(),
        )
