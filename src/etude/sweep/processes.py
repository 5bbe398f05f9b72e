"""Trainings as child processes of this one, several at a time; stopped together, they save and can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from etude.errors import DirectoryInUseError
from etude.runs.lock import DirectoryLock
from etude.secrets import redact

LAUNCHER = ("-m", "etude.cli.child")
"""Runs a command of ours, and ends it with this process."""
OUTPUT = "output.txt"
"""What a child printed, in its run directory."""
PREFIX = "etude: error: "
LOOK_EVERY_S = 0.1
FREE_WITHIN_S = 120.0
"""Time for a training that was left behind to save and end."""
STOP_WITHIN_S = 300.0
"""Time for a child to finish its step and save before it is killed."""
MOST_OUTPUT_BYTES = 1 << 16


class TrainingProcess:
    """One `etude train` in a process of its own, which writes into one run directory."""

    def __init__(
        self, directory: Path, arguments: Sequence[str], threads: int | None = None, folder: Path | None = None
    ) -> None:
        self.directory, self.arguments, self.threads = directory, list(arguments), threads
        self.folder = folder
        """Where it is started; None is here."""
        self.stopped_because = ""
        """Why it was asked to stop, if it was."""
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._begins_at_bytes = 0
        self._stopped_s = 0.0

    def start(self) -> None:
        """Start it, once nobody else writes the directory."""
        wait_until_free(self.directory)
        self._output = (self.directory / OUTPUT).open("ab")
        self._begins_at_bytes = self._output.tell()
        self.started_s = time.monotonic()
        # In a session of its own: Ctrl-C in the terminal is for the parent, which asks its children once.
        self._process = subprocess.Popen(
            [sys.executable, *LAUNCHER, str(os.getpid()), *self.arguments],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            env=_environment(os.environ, self.threads), cwd=self.folder,
        )  # fmt: skip

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        assert self._process is not None, "it was not started"
        if self.stopped_because and time.monotonic() > self._stopped_s + STOP_WITHIN_S:
            self._kill()
        code = self._process.poll()
        if code is not None and self._output is not None:
            self._output.close()
        return code

    def stop(self, because: str) -> None:
        """Ask it to save and end; asking twice is fine."""
        if not self.stopped_because and self._process is not None and self._process.poll() is None:
            self.stopped_because, self._stopped_s = because, time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def end(self, because: str, within_s: float = STOP_WITHIN_S) -> None:
        """Ask it to save and end, wait for that, and kill it where it does not."""
        if self._process is None:
            return
        self.stop(because)
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self.poll()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: its workers, too

    def complaint(self) -> str:
        """Return why it failed, in a sentence: its own, or else its last words and its exit code."""
        code = self._process.returncode if self._process is not None else None
        with (self.directory / OUTPUT).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(self._begins_at_bytes, size_bytes - MOST_OUTPUT_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
        if errors:
            return redact(errors[-1])
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return redact(f"exit code {code}{f': {lines[-1]}' if lines else ''}")


def wait_until_free(directory: Path, within_s: float = FREE_WITHIN_S) -> None:
    """Wait until no other training writes a directory: one that a killed parent left behind saves, and ends."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            with DirectoryLock(directory):
                return
        except DirectoryInUseError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(LOOK_EVERY_S)


def _environment(given: Mapping[str, str], threads: int | None) -> dict[str, str]:
    shared = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**shared, **given, "TERM": "dumb"}


def threads_of(jobs: int) -> int | None:
    """Return how many threads each of several processes should have; None leaves it to torch."""
    return None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)


class TrainingQueue(Protocol):
    """What is to be trained, one process after the other."""

    def next(self) -> TrainingProcess | None:
        """Return what to start next; None if nothing is left."""

    def look(self, process: TrainingProcess) -> None:
        """See how a process does, and stop it if it need not go on."""

    def ended(self, process: TrainingProcess, code: int) -> None:
        """Note that a process has ended by itself, or because `look` stopped it."""


class _StopRequest(Protocol):
    @property
    def received(self) -> int: ...


def run_queue(queue: TrainingQueue, jobs: int, signals: _StopRequest, deadline_s: float | None = None) -> str:
    """Train what a queue holds, so many at a time.

    Returns:
        "finished", "interrupted" by a signal, or "timeout" at the deadline; the latter two after all children saved.
    """
    running: list[TrainingProcess] = []
    is_empty = False
    try:
        while True:
            while len(running) < jobs and not is_empty:
                process = queue.next()
                is_empty = process is None
                if process is not None:
                    running.append(process)
                    process.start()
            if not running:
                return "finished"
            time.sleep(LOOK_EVERY_S)
            reason = "interrupted" if signals.received else ""
            if deadline_s is not None and time.monotonic() > deadline_s:
                reason = reason or "timeout"
            if reason:
                return reason
            for process in list(running):
                code = process.poll()
                if code is None:
                    queue.look(process)
                else:
                    running.remove(process)
                    queue.ended(process, code)
    finally:
        for process in running:
            process.stop("stopped")
        for process in running:
            process.end("stopped")
