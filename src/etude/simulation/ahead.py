"""Play attempts of a recording ahead of time, in processes: rendering takes most of it, and runs on one core each.

Which attempts are needed is known but for failures, so that what comes of it is what one process would have recorded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.simulation.environments.base import Array, Observation
from etude.simulation.processes import deal, run_in_processes

Attempt = tuple[int, int]
"""The environment, counted from 0, and the number of the attempt in it."""
ROUND = 8
"""Attempts that each process plays before all begin anew; no more than these lie on the disk as they are."""


class PlayedAttempt(NamedTuple):
    """An attempt, and what came of it."""

    frames: list[Observation]
    """None of them where it failed and failures are not kept."""
    success: bool
    env_steps: int


class PlayingAhead:
    """Attempts that are played in processes, in the order in which they will be asked for.

    Args:
        play: Plays an attempt.
        keep_failures: Whether the frames of failures are wanted.
        workers: Processes.
    """

    def __init__(self, play: Callable[[Attempt], PlayedAttempt], keep_failures: bool, workers: int) -> None:
        self._play, self._keep_failures, self._workers = play, keep_failures, workers
        self._found: dict[Attempt, dict[str, Any]] = {}
        self._messages = run_in_processes(self._work, [])
        self._folder = tempfile.TemporaryDirectory(prefix="etude-record-")

    def __enter__(self) -> PlayingAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.close()  # ends the processes
        self._folder.cleanup()

    def take(self, wanted: Attempt, coming: Callable[[], Iterator[Attempt]]) -> PlayedAttempt:
        """Return what came of an attempt.

        Args:
            wanted: The attempt.
            coming: The attempts that will be asked for from now on if none of them fails, this one first.
        """
        while wanted not in self._found:
            message = next(self._messages, None)
            if message is None:
                self._messages = self._begin(coming())
            else:
                self._found[message["attempt"][0], message["attempt"][1]] = message
        message = self._found.pop(wanted)
        frames = _read(Path(message["path"])) if message["path"] else []
        return PlayedAttempt(frames, message["success"], message["env_steps"])

    def _begin(self, coming: Iterator[Attempt]) -> Generator[Any, None, None]:
        most, jobs = ROUND * self._workers, []
        for attempt in coming:
            if attempt not in self._found:
                jobs.append(attempt)
            if len(jobs) == most:
                break
        return run_in_processes(self._work, deal(jobs, self._workers))

    def _work(self, share: Sequence[Attempt]) -> Iterator[dict[str, Any]]:
        for attempt in share:
            played = self._play(attempt)
            path = Path(self._folder.name) / f"{attempt[0]}-{attempt[1]}.safetensors"
            is_kept = played.success or self._keep_failures
            if is_kept:
                _write(path, played.frames)
            yield {
                "attempt": attempt, "success": played.success, "env_steps": played.env_steps,
                "path": str(path) if is_kept else "",
            }  # fmt: skip


def _write(path: Path, frames: Sequence[Mapping[str, Array]]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.stack([np.asarray(frame[name]) for frame in frames]) for name in frames[0]}, path)


def _read(path: Path) -> list[Observation]:
    from safetensors.numpy import load_file

    columns = load_file(path)
    path.unlink()
    count = len(next(iter(columns.values())))
    return [{name: np.asarray(values[place]) for name, values in columns.items()} for place in range(count)]
