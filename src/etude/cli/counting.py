"""Show how a count gets on: one line that is rewritten in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from etude.cli.output import visible
from etude.runs.progress import format_duration, is_terminal

_LINES = 5
"""Lines that a whole count takes outside of a terminal."""
_REPAINT_S = 0.1


class Counting:
    """A count of known length, on standard error."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._live = is_terminal(sys.stderr)
        self._began = time.monotonic()
        self._shown_s, self._shown_part = 0.0, 0
        self._first: int | None = None

    def show(self, done: int, note: str = "") -> None:
        """Show how many are done."""
        if self._first is None:
            self._first = done - 1
        now = time.monotonic()
        part = done * _LINES // max(1, self._total)
        if self._live:
            if now - self._shown_s < _REPAINT_S and done < self._total:
                return
        elif part == self._shown_part:
            return
        self._shown_s, self._shown_part = now, part
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = f"  ETA {format_duration((self._total - done) / rate)}" if done < self._total and rate else ""
        text = visible(f"{self._label} {done}/{self._total}{'  ' + note if note else ''}{left}")
        sys.stderr.write(f"\r\x1b[2K{text}" if self._live else text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._live and self._shown_s:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
