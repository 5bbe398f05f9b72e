"""metrics.jsonl: one JSON object a line, always on, exact, cut back to the checkpoint on resume. No torch here."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.runs.durable import write_atomically

_MAX_BACKLOG_BYTES = 16 << 20  # A disk that stays full must not turn into memory that does.


class MetricsLog:
    """Appends rows to metrics.jsonl; each row is with the operating system when `write` returns.

    While the disk is full, rows wait in memory and go out with the first write that succeeds.
    """

    def __init__(self, path: Path | str, *, on_warning: Callable[[str], None] | None = None) -> None:
        self.path = Path(path)
        self._warn = on_warning or logging.getLogger(__name__).warning
        self._backlog = b""
        self._failing = False
        self._descriptor = -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row: the step, then the metrics in the order given."""
        row = {"step": int(step), **{name: _to_json(value) for name, value in metrics.items()}}
        self._backlog += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._flush()

    def truncate_after(self, step: int) -> None:
        """Drop the rows after `step`, and any that are torn, in one atomic step."""
        self._flush()
        content = self.path.read_bytes()
        kept = b"".join(line + b"\n" for line, row in _rows(content) if row["step"] <= step)
        if kept != content:
            os.close(self._descriptor)
            try:
                write_atomically(self.path, kept)
            finally:
                self._open()

    def sync(self) -> None:
        """Make the rows so far survive a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what still waits and close the file; closing twice is fine."""
        if self._descriptor < 0:
            return
        self._flush()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size_bytes = _end_of_last_line(self._descriptor)
        os.ftruncate(self._descriptor, self._size_bytes)  # A torn last line would swallow the next row.

    def _flush(self) -> None:
        try:
            while self._backlog:
                count = os.write(self._descriptor, self._backlog)
                if count < len(self._backlog):
                    # A short write means a full disk: take the torn part back, the whole backlog goes again.
                    os.ftruncate(self._descriptor, self._size_bytes)
                    raise OSError(f"only {count} of {len(self._backlog)} bytes were written")
                self._size_bytes += count
                self._backlog = b""
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                self._warn(f"metrics cannot be written to {self.path} ({error}); keeping them in memory meanwhile")
            if len(self._backlog) > _MAX_BACKLOG_BYTES:
                self._backlog = self._backlog[self._backlog.index(b"\n", len(self._backlog) // 2) + 1 :]
                self._warn(f"metrics still cannot be written to {self.path}; dropped the older half of those in memory")


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; a missing file has none, and a torn line is passed over."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return [row for _, row in _rows(content)]


def last_metrics(path: Path | str, *, tail_bytes: int = 1 << 16) -> dict[str, Any]:
    """Return the latest value of every metric (and the latest step) near the end of a metrics.jsonl."""
    try:
        with open(path, "rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - tail_bytes))
            content = file.read()
    except OSError:
        return {}
    latest: dict[str, Any] = {}
    for _, row in _rows(content):
        latest |= row
    return latest


def _to_json(value: Any) -> int | float | str:
    number = value if type(value) in (int, float) else float(value)
    # JSON has no NaN and no infinity, yet they are what one most wants to see: written as text, read back as numbers.
    return number if type(number) is int or math.isfinite(number) else repr(number)


def _from_json(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= 1 << 1000:  # more than a float can hold
        return math.inf if value > 0 else -math.inf
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _rows(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and 0 <= row["step"] < 1 << 53:
            yield line, {name: _from_json(value) for name, value in row.items()}


def _end_of_last_line(descriptor: int, block_bytes: int = 1 << 16) -> int:
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block_bytes)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
