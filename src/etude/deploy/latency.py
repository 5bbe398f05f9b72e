"""How long actions take, in few numbers."""

from __future__ import annotations

from collections import deque

WINDOW = 10_000
"""Measurements that percentiles look back on."""


class Latency:
    """Durations of one kind of work: how many there were, and percentiles of the last `WINDOW`."""

    def __init__(self) -> None:
        self.count = 0
        self._recent_ms: deque[float] = deque(maxlen=WINDOW)

    def add(self, milliseconds: float) -> None:
        """Take a measurement."""
        self.count += 1
        self._recent_ms.append(milliseconds)

    def percentile_ms(self, share: float) -> float:
        """Return the duration that this share of the recent ones stays within; 0 before there is any."""
        ordered = sorted(self._recent_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def __str__(self) -> str:
        p50, p95, top = (self.percentile_ms(share) for share in (0.5, 0.95, 1.0))
        return f"p50 {p50:.2f} ms, p95 {p95:.2f} ms, max {top:.2f} ms"
