"""A watch over the ranks of a group: one that dies or hangs ends the group within seconds, by name and phase.

Every rank runs a small thread that publishes (heartbeat, phase, step, progress) in the group's key-value store and
reads those of the others. A heartbeat that stops means a dead process on another host; on this one the process table
tells, and a process that lives but is silent is busy inside C, where no thread of ours runs. Progress that stops means
a rank that hangs, unless that rank is merely waiting for another in a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from etude.errors import EtudeError, Interrupted, RankError, ShortRunError
from etude.runs.durable import is_this_host

INTERVAL_S = 0.5
DEAD_AFTER_S = 8.0
"""Silence after which a rank on another host counts as dead; on this host its process id tells at once."""
FAREWELL_S = 10.0
"""Time for which rank 0, whose process may hold the store, waits for the others to end."""
STARTUP_LIMIT_S = 600.0
"""Time for the first step and for phases that are long by nature: setup, evaluate, save."""
_RUNS = itertools.count()
LONG_PHASES = frozenset({"setup", "evaluate", "save", "done"})


@dataclass
class Pulse:
    """What the training thread tells its watchdog; plain attribute writes, so that it costs nothing."""

    phase: str = "setup"
    """setup, data, loss, sync, update, evaluate, save, done; `sync` waits for other ranks."""
    step: int = 0
    marks: int = 0
    """Grows whenever the training thread gets anywhere."""
    longest_step_s: float = 0.0

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.marks += 1


class Watchdog:
    """Ends this process when a rank of its group is dead or hangs. Use as a context around training."""

    def __init__(
        self, rank: int, world: int, pulse: Pulse, limit_s: float | None, on_fault: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.world, self.pulse, self.limit_s = rank, world, pulse, limit_s
        self._on_fault = on_fault or self._end_process
        self._failed = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="etude-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if "MASTER_ADDR" not in os.environ:
            self.world = 1  # a group made by other means than torchrun's has no store that we could reach
        if self.world > 1:
            # A client of its own: the training thread may sit inside a collective that uses the group's store.
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5)
            )
            # All ranks count alike: what was said in an earlier run of the same processes is not read in this one.
            self._prefix = f"etude/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_RUNS)}"
            self._publish()
            self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self.world > 1:
            self._done.set()
            self._thread.join(timeout=10)
            # An error that every rank raises together (a NaN, a signal) is no fault of this rank towards the others.
            together = error_type is None or issubclass(error_type, EtudeError | Interrupted)
            together &= error_type is None or not issubclass(error_type, ShortRunError)  # one rank's code may exit
            self._failed = not together
            if together:
                self.pulse.enter("done")
            with contextlib.suppress(RuntimeError):  # the store went away with rank 0: nobody is left to tell
                self._publish()
                if self.rank == 0:
                    self._see_off()

    def diagnose(self, patience_s: float = 3.0) -> str | None:
        """Return which rank died or failed, if one did, after an error that a lost peer would explain."""
        if self.world == 1:
            return None
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                reports = self._read()
                fault = self._find_dead(reports, {}, 0.0)
                ended = [rank for rank in reports if rank != self.rank and reports[rank]["phase"] == "done"]
            except RuntimeError:
                return "rank 0 is gone: its store does not answer"
            if fault or ended:
                return fault or f"rank {ended[0]} ended with an error of its own"
            time.sleep(0.1)
        return None

    def _see_off(self) -> None:
        """Wait until every other rank has ended: one that still watches would take the lost store for a lost rank."""
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline:
            others = [report for rank, report in self._read().items() if rank != self.rank]
            if not any(report["phase"] != "done" and _may_live(report) for report in others):
                return
            time.sleep(0.01)

    def _watch(self) -> None:
        seen: dict[int, tuple[Any, float]] = {}
        while not self._done.wait(INTERVAL_S):
            try:
                self._publish()
                reports = self._read()
            except RuntimeError as error:
                if not self._done.is_set():
                    self._on_fault(f"rank 0 is gone: its store does not answer ({str(error).splitlines()[0]})")
                return
            now = time.monotonic()
            fault = self._find_dead(reports, seen, now) or self._find_hung(reports, seen, now)
            if fault and not self._done.is_set():
                self._on_fault(fault)
                return

    def _publish(self) -> None:
        pulse = self.pulse
        report = {
            "phase": pulse.phase, "step": pulse.step, "marks": pulse.marks, "pid": os.getpid(),
            "host": socket.gethostname(), "beat": time.time(), "longest": pulse.longest_step_s,
            "failed": self._failed, "started": _started(os.getpid()),
        }  # fmt: skip
        self._store.set(self._key(self.rank), json.dumps(report))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _read(self) -> dict[int, dict[str, Any]]:
        return {rank: self._read_one(rank) for rank in range(self.world) if self._store.check([self._key(rank)])}

    def _read_one(self, rank: int) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self._store.get(self._key(rank)))
        return report

    def _find_dead(self, reports: dict[int, dict[str, Any]], seen: dict[Any, Any], now: float) -> str | None:
        for rank, report in reports.items():
            if rank == self.rank or report["phase"] == "done":
                continue
            if report["failed"]:
                return f"rank {rank} failed in phase '{report['phase']}' at step {report['step']}"
            beat, since = seen.get(("beat", rank), (None, now))
            if beat != report["beat"]:
                seen["beat", rank] = (report["beat"], now)
                since = now
            silent = not is_this_host(report["host"]) and now - since > DEAD_AFTER_S
            gone = silent or not _may_live(report)
            # It may have said that it is done, and ended, after this report was read.
            if gone and self._read_one(rank)["phase"] != "done":
                return f"rank {rank} died in phase '{report['phase']}' at step {report['step']}"
        return None

    def _find_hung(self, reports: dict[int, dict[str, Any]], seen: dict[Any, Any], now: float) -> str | None:
        for rank, report in reports.items():
            mark = (report["phase"], report["marks"])
            last, since = seen.get(("mark", rank), (None, now))
            if last != mark:
                seen["mark", rank] = (mark, now)
                since = now
            # A rank in `sync` waits for others; blame whoever is not there.
            stuck_s = now - since
            # One that does not even say so is no mere waiter: its thread is kept from running.
            beat, heard = seen.get(("beat", rank), (None, now))
            waits = report["phase"] == "sync" and (beat != report["beat"] or now - heard < DEAD_AFTER_S)
            if not waits and report["phase"] != "done" and stuck_s > self._limit(report):
                return f"rank {rank} hangs in phase '{report['phase']}' at step {report['step']} for {stuck_s:.0f} s"
        waits = [now - seen["mark", rank][1] for rank in reports if reports[rank]["phase"] == "sync"]
        if len(waits) == self.world and min(waits) > max(self._limit(report) for report in reports.values()):
            places = ", ".join(f"rank {rank} at step {report['step']}" for rank, report in reports.items())
            return f"all ranks hang in phase 'sync' for {min(waits):.0f} s ({places}): their collectives do not match"
        return None

    def _limit(self, report: dict[str, Any]) -> float:
        if report["phase"] in LONG_PHASES or not report["longest"]:
            return max(self.limit_s or 0.0, STARTUP_LIMIT_S)
        return self.limit_s or min(600.0, max(10.0, 20 * float(report["longest"])))

    def _end_process(self, fault: str) -> None:
        print(f"etude: {fault}; ending rank {self.rank}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        os._exit(RankError.exit_code)


def _may_live(report: dict[str, Any]) -> bool:
    return not is_this_host(report["host"]) or _is_alive(report["pid"], report.get("started"))


def _is_alive(pid: int, started: str | None = None) -> bool:
    """Tell whether a process lives; `started` tells it from a later one that got the same id."""
    fields = _stat(pid)
    if fields is not None:
        return fields[0] != "Z" and started in (None, fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not os.path.isdir("/proc/self")  # with a /proc, no entry means no process


def _started(pid: int) -> str | None:
    """Return when a process began, in ticks since the machine did, if this system tells."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def _stat(pid: int) -> list[str] | None:
    """Return /proc's fields of a process from its state on."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between the two calls
        return None
