"""Connections: each says what it wants in time, takes what it asked for, and none keeps the others out."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Line(H11Protocol):
    """A connection over HTTP/1.1 that is cut when nothing comes of it.

    uvicorn waits for ever for the rest of a request's head, and for a client that does not read its answer.
    """

    silent_s: ClassVar[float] = 75.0
    """How long a connection may be without a whole request."""
    stuck_s: ClassVar[float] = 60.0
    """How long a client may take in nothing of an answer."""
    most: ClassVar[int] = 2000
    """Connections at a time; beyond these, the one that has been without a request the longest is cut."""
    _turns: ClassVar[itertools.count[int]] = itertools.count()
    """Tells which line fell silent first: uvloop's clock stands still while it accepts several."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look after a new connection."""
        super().connection_made(transport)
        self._left, self._moved_s = 0, self.loop.time()
        self._fall_silent()
        self._looking = self.loop.call_later(self._every_s(), self._look)
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        self._looking.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Note that the client takes in its answer."""
        self._moved_s = self.loop.time()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Note since when no request is under way."""
        self._fall_silent()
        super().on_response_complete()

    def _make_room(self) -> None:
        lines = [one for one in self.connections if isinstance(one, Line) and not one.transport.is_closing()]
        if len(lines) > self.most:
            idle = [one for one in lines if not one._is_asking()]
            min(idle, key=lambda one: one._turn).transport.abort()

    def _fall_silent(self) -> None:
        self._since_s, self._turn = self.loop.time(), next(self._turns)

    def _every_s(self) -> float:
        return min(self.silent_s, self.stuck_s) / 4

    def _is_asking(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _look(self) -> None:
        now_s, left = self.loop.time(), self.transport.get_write_buffer_size()
        if left < self._left or not left:
            self._moved_s = now_s
        self._left = left
        is_silent = not left and not self._is_asking() and now_s - self._since_s > self.silent_s
        if is_silent or now_s - self._moved_s > self.stuck_s:
            self.transport.abort()
            return
        self._looking = self.loop.call_later(self._every_s(), self._look)
