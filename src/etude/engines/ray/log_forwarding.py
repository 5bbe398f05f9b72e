"""What a worker says: output, log records and progress go to the driver, which shows them as if they were its own."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from etude.runs.progress import ProgressDisplay

Post = Callable[[str, Any], object]
"""Sends a message: its kind, and its content."""
LOGGERS = ("", "etude")
"""Loggers whose levels workers take over from the driver."""


def log_levels() -> dict[str, int]:
    """Return what the driver wants to hear."""
    return {name: logging.getLogger(name).level for name in LOGGERS}


@contextmanager
def forwarding(post: Post, levels: Mapping[str, int]) -> Iterator[None]:
    """Send what this process prints and logs to the driver."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    handler = ForwardingHandler(post)
    streams = sys.stdout, sys.stderr
    logging.getLogger().addHandler(handler)
    sys.stdout, sys.stderr = ForwardedStream(post, "out", streams[0]), ForwardedStream(post, "err", streams[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        logging.getLogger().removeHandler(handler)


class ForwardedStream(io.TextIOBase):
    """A text stream whose lines are posted; its file descriptor is still that of Ray's own log."""

    def __init__(self, post: Post, name: str, beneath: Any) -> None:
        self._post, self._name, self._beneath = post, name, beneath
        self._kept = ""

    def write(self, text: str) -> int:
        """Post whole lines, and keep the rest until it is one."""
        lines, newline, rest = (self._kept + text).rpartition("\n")
        self._kept = rest
        if newline:
            self._post(self._name, lines + newline)
        return len(text)

    def flush(self) -> None:
        """Post what is left over."""
        kept, self._kept = self._kept, ""
        if kept:
            self._post(self._name, kept)

    def writable(self) -> bool:
        """Say yes."""
        return True

    def fileno(self) -> int:
        """Return where a crash may still write."""
        number: int = self._beneath.fileno()
        return number


class ForwardingHandler(logging.Handler):
    """Posts log records, except for Ray's own."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._post = post

    def emit(self, record: logging.LogRecord) -> None:
        """Post text, level and place."""
        if record.name.partition(".")[0] == "ray":
            return
        fields = {"name": record.name, "levelno": record.levelno, "levelname": record.levelname}
        fields |= {"pathname": record.pathname, "lineno": record.lineno, "funcName": record.funcName}
        error = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text
        self._post("log", {**fields, "msg": record.getMessage(), "exc_text": error, "created": record.created})


class ForwardedDisplay(ProgressDisplay):
    """A display whose updates are posted."""

    def __init__(self, post: Post) -> None:
        super().__init__(enabled=False)
        self._post = post

    def update(
        self, step: int, total_steps: int | None = None, metrics: Mapping[str, float] | None = None,
        rate: float | None = None, eta: float | None = None,
    ) -> None:  # fmt: skip
        """Post the figures."""
        self._post("progress", (step, total_steps, dict(metrics or {}), rate, eta))


class Listener:
    """Shows the messages of the workers in the driver."""

    def __init__(self) -> None:
        self.entered: set[int] = set()
        self._display: ProgressDisplay | None = None

    def show(self, kind: str, content: Any) -> None:
        """Show one message."""
        if kind == "entered":
            self.entered.add(content)
        elif kind == "progress":
            if self._display is None:
                self._display = ProgressDisplay()
            self._display.update(*content)
        elif kind == "log":
            logging.getLogger(content["name"]).handle(logging.makeLogRecord(content))
        else:
            stream = sys.stdout if kind == "out" else sys.stderr
            stream.write(content)
            stream.flush()

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._display is not None:
            self._display.close()
