"""A thread that does what is waiting, target by target, and outlives every fault of one of them."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from etude.errors import one_line

if TYPE_CHECKING:
    from etude.service.server.service import Service

log = logging.getLogger("etude.service")
LOOK_S = 10.0
"""How often targets are looked at that nothing new has come for."""


def explain(error: Exception, what: str, *names: object) -> str:
    """Log a fault of the service, with its place in the code unless the disk is to blame; return it as a sentence."""
    why = one_line(error)
    if isinstance(error, OSError | sqlite3.OperationalError):
        log.error(what + ": %s", *names, why)
        return f"the service cannot write or read its files: {why}"
    log.error(what, *names, exc_info=error)
    return f"the service failed: {type(error).__name__}: {why}"


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

    def heed(self, target: str) -> bool:
        """Tell whether a target was noticed since it was last looked at, which it is now."""
        with self._change:
            is_due = target in self._due
            if is_due:
                self._due.remove(target)
            return is_due

    @property
    def is_wanted(self) -> bool:
        """Whether a target waits for its turn."""
        return bool(self._due)

    def _run(self) -> None:
        looked_s = time.monotonic()
        while True:
            with self._change:
                if not self._due and not self._is_stopping:
                    self._change.wait(LOOK_S)
                if self._is_stopping:
                    return
                if time.monotonic() - looked_s >= LOOK_S:
                    looked_s = time.monotonic()
                    self._due.extend(target for target in self._overdue() if target not in self._due)
                if not self._due:
                    continue
                target = self._due.popleft()
            try:
                if self._serve(target):
                    self.notice(target)
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                explain(error, "%s for %s failed and is tried again", self.name, target)
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
