"""A thread that does what is waiting, target by target, and outlives every fault of one of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from etude.service.server.service import Service

log = logging.getLogger("etude.service")
IDLE_S = 30.0


class Worker:
    """Serves models or sampling sessions in turn; subclasses say how."""

    name: ClassVar[str]
    waiting: ClassVar[str]
    """Which requests are its own, as a condition of SQL."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._due: deque[str] = deque()
        self._change = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Begin, with what was left undone."""
        query = f"SELECT DISTINCT target FROM requests WHERE state='pending' AND {self.waiting} ORDER BY number"
        for row in self._service.store.all(query):
            self.notice(row["target"])
        self._thread.start()

    def stop(self) -> None:
        """End after what is being done."""
        with self._change:
            self._is_stopping = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join()

    def notice(self, target: str) -> None:
        """Look at a target soon."""
        with self._change:
            if target not in self._due:
                self._due.append(target)
            self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._due and not self._is_stopping:
                    self._change.wait(IDLE_S)
                    self._due.extend(self._overdue())
                if self._is_stopping:
                    return
                target = self._due.popleft()
            try:
                if self._serve(target):
                    self.notice(target)
            except Exception:
                log.exception("%s for %s failed", self.name, target)
                self._forget(target)
                time.sleep(1.0)
                self.notice(target)

    def _serve(self, target: str) -> bool:
        """Do the next thing for a target; tell whether there was one."""
        raise NotImplementedError

    def _overdue(self) -> list[str]:
        """Name targets to look at though nothing new has come."""
        return []

    def _forget(self, target: str) -> None:
        """Drop what is in memory of a target: what was done to it is written nowhere."""
