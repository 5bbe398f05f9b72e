"""The mailbox: a small actor through which the driver and its workers talk. Imports no torch, so that it starts soon.

Workers post what they say (output, log records, progress) and deliver how they ended; the driver collects both and
leaves one message for all of them: a signal to stop. An actor reaches every host of a cluster.
"""

from __future__ import annotations

import asyncio
from typing import Any

COLLECT_WITHIN_S = 1.0


class Mailbox:
    """Letters from the workers to the driver, and one signal from the driver to the workers."""

    def __init__(self) -> None:
        self._letters: list[tuple[str, Any]] = []
        self._arrived = asyncio.Event()
        self._signal = 0
        self._signalled = asyncio.Event()
        self._attempts: dict[int, int] = {}
        self._outcomes: dict[int, dict[str, Any]] = {}
        self._delivered = asyncio.Condition()

    async def enter(self, rank: int) -> dict[str, int]:
        """Note that a worker has begun; tell how often before, which signal came, and whether the code has failed."""
        attempt = self._attempts.get(rank, 0)
        self._attempts[rank] = attempt + 1
        await self.post("entered", rank)
        failed = any("error" in outcome for outcome in self._outcomes.values())
        return {"attempt": attempt, "signal": self._signal, "failed": int(failed)}

    async def post(self, kind: str, content: Any) -> None:
        """Leave a letter for the driver."""
        self._letters.append((kind, content))
        self._arrived.set()

    async def collect(self, wait_s: float = COLLECT_WITHIN_S) -> list[tuple[str, Any]]:
        """Return the letters that have come, waiting a while for the first."""
        try:
            await asyncio.wait_for(self._arrived.wait(), wait_s)
        except TimeoutError:
            return []
        letters, self._letters = self._letters, []
        self._arrived.clear()
        return letters

    async def interrupt(self, number: int) -> None:
        """Tell every worker, now or when it begins, that a signal asks to stop."""
        self._signal = number
        self._signalled.set()

    async def wait_for_interrupt(self) -> int:
        """Return the signal once there is one."""
        await self._signalled.wait()
        return self._signal

    async def deliver(self, rank: int, outcome: dict[str, Any]) -> None:
        """Take how a worker ended; the first error of a rank stands."""
        async with self._delivered:
            if "error" not in self._outcomes.get(rank, {}):
                self._outcomes[rank] = outcome
            self._delivered.notify_all()

    async def all_delivered(self, world: int, wait_s: float) -> bool:
        """Tell whether every rank has delivered, after waiting for the others a while."""
        async with self._delivered:
            try:
                await asyncio.wait_for(self._delivered.wait_for(lambda: len(self._outcomes) >= world), wait_s)
            except TimeoutError:
                return False
            return True

    async def outcomes(self) -> dict[int, dict[str, Any]]:
        """Return how the workers ended, in the order in which they did."""
        return self._outcomes
