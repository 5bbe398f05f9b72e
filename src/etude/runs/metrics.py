"""metrics.jsonl and its like: one JSON object a line, exact, cut back to the checkpoint on resume. No torch here."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

_MAX_BACKLOG_BYTES = 16 << 20  # A disk that stays full must not turn into memory that does.


class StepLog:
    """Appends rows in the order of their steps; each row is with the operating system when `append` returns.

    While the disk is full, rows wait in memory and go out with the first write that succeeds.
    """

    what = "rows"
    """What the rows are, in messages."""

    def __init__(self, path: Path | str, *, on_warning: Callable[[str], None] | None = None) -> None:
        self.path = Path(path)
        self._warn = on_warning or logging.getLogger(__name__).warning
        self._backlog = b""
        self._failing = False
        self._descriptor = -1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row, which has its `step` and plain values."""
        self._backlog += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._flush()

    def truncate_after(self, step: int) -> None:
        """Drop the rows after `step` in one atomic step, reading no others: rows are in the order of their steps."""
        self._flush()
        lines = _lines_from_the_end(self._descriptor)
        self._size_bytes = next((end for end, line in lines if _is_row_until(line, step)), 0)
        os.ftruncate(self._descriptor, self._size_bytes)

    def close(self) -> None:
        """Write what still waits and close the file; closing twice is fine."""
        if self._descriptor < 0:
            return
        self._flush()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size_bytes = next((end for end, _ in _lines_from_the_end(self._descriptor)), 0)
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
                self._warn(f"{self.what} cannot be written to {self.path} ({error}); keeping them in memory meanwhile")
            if len(self._backlog) > _MAX_BACKLOG_BYTES:
                self._backlog = self._backlog[self._backlog.index(b"\n", len(self._backlog) // 2) + 1 :]
                self._warn(f"{self.what} still cannot be written to {self.path}; dropped the older half in memory")


class MetricsLog(StepLog):
    """Appends rows of numbers to metrics.jsonl."""

    what = "metrics"

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row: the step, then the metrics in the order given."""
        self.append({"step": int(step), **{name: _to_json(value) for name, value in metrics.items()}})


def read_rows(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows that a `StepLog` wrote; a missing file has none, and a torn line is passed over."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return list(_rows(content))


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, with the numbers that JSON lacks."""
    return [_numbers(row) for row in read_rows(path)]


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
    for row in _rows(content):
        latest |= _numbers(row)
    return latest


def _to_json(value: Any) -> int | float | str:
    number = value if type(value) in (int, float) else float(value)
    # JSON has no NaN and no infinity, yet they are what one most wants to see: written as text, read back as numbers.
    return number if type(number) is int or math.isfinite(number) else repr(number)


def _from_json(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= 1 << 1000:  # more than a float can hold
        return math.inf if value > 0 else -math.inf
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _from_json(value) for name, value in row.items()}


def _rows(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and 0 <= row["step"] < 1 << 53:
            yield row


def _is_row_until(line: bytes, step: int) -> bool:
    return any(row["step"] <= step for row in _rows(line))


def _lines_from_the_end(descriptor: int, block_bytes: int = 1 << 16) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a file, the last one first, each with the place where it ends."""
    start, rest = os.fstat(descriptor).st_size, b""
    while start > 0:
        size = min(block_bytes, start)
        start -= size
        content = os.pread(descriptor, size, start) + rest
        newline = content.rfind(b"\n")
        while newline >= 0:
            before = content.rfind(b"\n", 0, newline)
            if before < 0 and start > 0:
                break  # this line begins further up
            yield start + newline + 1, content[before + 1 : newline]
            newline = before
        rest = content[: newline + 1] if newline >= 0 else content
