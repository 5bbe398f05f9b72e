"""A watch over the ranks of a group: one that dies or hangs ends the group within seconds, by name and phase.

Every rank runs a small thread that publishes (heartbeat, phase, step, progress) and reads the reports of its neighbours
on the `Board`. A heartbeat that stops means a dead process on another host; on this one the process table tells, and a
process that lives but is silent is busy inside C, where no thread of ours runs. Progress that stops means a rank that
hangs, unless that rank is merely waiting for another in a collective. Whether all do is added up along the tree.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
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
from etude.loop.board import Board, Report
from etude.runs.durable import is_this_host

INTERVAL_S = 0.5
DEAD_AFTER_S = 8.0
"""Silence after which a rank on another host counts as dead; on this host its process id tells at once."""
LOST_PATIENCE_S = 20.0
"""How long the rank behind a lost connection is looked for: on a busy machine its host may take seconds to tell."""
FAREWELL_S = 10.0
"""Time for which rank 0, whose process may hold the store, waits for the others to end."""
CONNECT_WITHIN, ANSWER_WITHIN = timedelta(seconds=60), timedelta(seconds=20)
"""Many ranks may come to the store at once, and its host may be busy; a process that is gone shows at once."""
STARTUP_LIMIT_S = 600.0
"""Time for the first step and for phases that are long by nature: setup, evaluate, save."""
_RUNS = itertools.count()
MOST_PLACES = 8
"""Ranks that a message lists before it only counts the rest."""
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
            store = dist.TCPStore(  # type: ignore[attr-defined]
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=CONNECT_WITHIN
            )
            store.set_timeout(ANSWER_WITHIN)
            # All ranks count alike: what was said in an earlier run of the same processes is not read in this one.
            prefix = f"etude/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_RUNS)}"
            self._board = Board(store, prefix, self.rank, self.world, socket.gethostname())
            self._board.join(self._report())
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
                self._board.publish(self._report())
                if together:
                    self._board.end()
                else:
                    self._board.put_up(_failure(self.rank, self._report()))
                if self.rank == 0:
                    self._see_off()

    def explain(self, error: BaseException) -> str | None:
        """Return which rank died or failed, if that may be behind an error; one of a lost connection waits longer."""
        if not isinstance(error, RuntimeError):
            return None
        return self.diagnose(LOST_PATIENCE_S) if "onnection" in str(error) else self.diagnose()

    def diagnose(self, patience_s: float = 3.0) -> str | None:
        """Return which rank died or failed, if one did, after an error that a lost peer would explain."""
        if self.world == 1:
            return None
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                reports, told, ended = self._board.read()
                # Of this host by itself: whoever leads it may be kept from running, or meet the same error.
                fault = told or self._find_dead({**reports, **self._board.read_host()}, {}, 0.0)
                if fault and not told:
                    self._board.put_up(fault)
            except RuntimeError:
                return "rank 0 is gone: its store does not answer"
            others = [rank for rank in ended if rank != self.rank]
            if fault or others:
                return fault or f"rank {others[0]} ended with an error of its own"
            time.sleep(0.1)
        return None

    def _see_off(self) -> None:
        """Wait until every other rank has ended: one that still watches would take the lost store for a lost rank."""
        deadline = time.monotonic() + FAREWELL_S
        look = 0.0
        while time.monotonic() < deadline and len({*self._board.ended(), self.rank}) < self.world:
            if time.monotonic() > look:  # one that was killed says nothing
                others = [report for rank, report in self._read().items() if rank != self.rank]
                if not any(report["phase"] != "done" and _may_live(report) for report in others):
                    return
                look = time.monotonic() + INTERVAL_S
            time.sleep(0.01)

    def _watch(self) -> None:
        seen: dict[Any, tuple[Any, float]] = {}
        below: Report | None = None
        while not self._done.wait(INTERVAL_S):
            try:
                own = self._report(below)
                self._board.publish(own)
                reports, told, _ = self._board.read()
                reports[self.rank] = own
                now = time.monotonic()
                fault = told or self._find_dead(reports, seen, now) or self._find_hung(reports, seen, now)
                below = self._add_up(reports, seen, now) if self._board.leads else None
                if below is not None and not fault and self._board.parent is None:
                    fault = self._find_mismatch(below)
                if fault and not told and not self._done.is_set():
                    self._board.put_up(fault)
            except RuntimeError as error:
                if not self._done.is_set():
                    self._on_fault(f"rank 0 is gone: its store does not answer ({str(error).splitlines()[0]})")
                return
            if fault and not self._done.is_set():
                with contextlib.suppress(RuntimeError):
                    self._let_others_read()
                self._on_fault(fault)
                return

    def _let_others_read(self) -> None:
        """Acknowledge a fault; rank 0, with which the store may go, first waits a moment for the others to."""
        self._board.end()
        deadline = time.monotonic() + 4 * INTERVAL_S
        # One may be dead; that a second one is silent too ends the wait by the clock.
        while self.rank == 0 and len(self._board.ended()) < self.world - 1 and time.monotonic() < deadline:
            time.sleep(INTERVAL_S / 10)

    def _report(self, below: Report | None = None) -> Report:
        pulse = self.pulse
        return {
            "phase": pulse.phase, "step": pulse.step, "marks": pulse.marks, "pid": os.getpid(),
            "host": socket.gethostname(), "beat": time.time(), "longest": pulse.longest_step_s,
            "failed": self._failed, "started": _started(os.getpid()), "below": below,
        }  # fmt: skip

    def _read(self) -> dict[int, Report]:
        return self._board.read_all()

    def _find_dead(self, reports: dict[int, Report], seen: dict[Any, Any], now: float) -> str | None:
        for rank, report in reports.items():
            if rank == self.rank or report["phase"] == "done":
                continue
            if report["failed"]:
                return _failure(rank, report)
            beat, since = seen.get(("beat", rank), (None, now))
            if beat != report["beat"]:
                seen["beat", rank] = (report["beat"], now)
                since = now
            silent = not is_this_host(report["host"]) and now - since > DEAD_AFTER_S
            gone = silent or not _may_live(report)
            # It may have said that it is done, and ended, after this report was read.
            if gone and self._board.read_one(rank)["phase"] != "done":
                return f"rank {rank} died in phase '{report['phase']}' at step {report['step']}"
        return None

    def _find_hung(self, reports: dict[int, Report], seen: dict[Any, Any], now: float) -> str | None:
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
        return None

    def _add_up(self, reports: dict[int, Report], seen: dict[Any, Any], now: float) -> Report:
        """Return how many ranks there are on this host and below, and for how long all of them have only waited."""
        own = {rank: reports[rank] for rank in self._board.members if rank in reports}
        waits: list[Any] = [now - seen["mark", rank][1] if r["phase"] == "sync" else None for rank, r in own.items()]
        found = [
            {"ranks": len(own), "waited": None if None in waits else min(waits), "places": [
                f"rank {rank} at step {report['step']}" for rank, report in own.items()
            ], "limit": max(map(self._limit, own.values()))},
            *(reports[rank]["below"] for rank in self._board.children if rank in reports and reports[rank]["below"]),
        ]  # fmt: skip
        waited = [one["waited"] for one in found]
        return {
            "ranks": sum(one["ranks"] for one in found),
            "waited": None if None in waited else min(waited),
            "limit": max(one["limit"] for one in found),
            "places": [place for one in found for place in one["places"]][:MOST_PLACES],
        }

    def _find_mismatch(self, all_ranks: Report) -> str | None:
        waited, places = all_ranks["waited"], all_ranks["places"]
        if all_ranks["ranks"] < self.world or waited is None or waited <= all_ranks["limit"]:
            return None
        more = f" and {self.world - len(places)} more" if self.world > len(places) else ""
        return (
            f"all ranks hang in phase 'sync' for {waited:.0f} s ({', '.join(sorted(places))}{more}): their collectives "
            "do not match"
        )

    def _limit(self, report: Report) -> float:
        if report["phase"] in LONG_PHASES or not report["longest"]:
            return max(self.limit_s or 0.0, STARTUP_LIMIT_S)
        return self.limit_s or min(600.0, max(10.0, 20 * float(report["longest"])))

    def _end_process(self, fault: str) -> None:
        print(f"etude: {fault}; ending rank {self.rank}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        os._exit(RankError.exit_code)


def _failure(rank: int, report: Report) -> str:
    return f"rank {rank} failed in phase '{report['phase']}' at step {report['step']}"


def _may_live(report: Report) -> bool:
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
