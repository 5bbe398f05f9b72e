"""Errors that users can act on: one sentence, one exit code per class of mistake.

Everything the user can cause derives from `EtudeError`; the command line prints its message without a traceback.
Anything else is our mistake and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def one_line(error: BaseException, most: int = 200) -> str:
    """Return what an error says as one line of at most so many characters, or its class if it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def as_path(given: Any, what: str) -> Path:
    """Return a path, or say in a sentence what was given instead of one."""
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise ConfigError(f"{what} must be a path, got {given!r}")
    return Path(given)


class EtudeError(Exception):
    """Base of every error that a user can cause and mend."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if exit_code is not None:
            cls.exit_code = exit_code


class ConfigError(EtudeError, ValueError, exit_code=2):
    """A configuration file, override or parameter is wrong."""


class RegistryError(ConfigError):
    """A registry key is unknown, taken, or its class does not fit."""


def no_place(error: OSError, place: Path | str = "") -> ConfigError:
    """Return the error for a place that was named to be written, and that the system refuses."""
    name = os.fsdecode(error.filename2 or error.filename or place)  # the second is where a file was to be moved
    return ConfigError(f"cannot use {name}: {error.strerror}; make it writable, or name another place")


class DataError(EtudeError, exit_code=3):
    """Data is missing, malformed, or ended too early."""


class CheckpointError(EtudeError, exit_code=4):
    """No usable checkpoint, or one that could not be written."""


class NonFiniteError(EtudeError, ArithmeticError, exit_code=5):
    """A loss, gradient, reward or action is NaN or infinite; raised before the update, or before the robot moves."""


class RankError(EtudeError, exit_code=6):
    """A rank of the group died or hangs."""


class ShortRunError(EtudeError, exit_code=7):
    """Training ended before the requested length."""


class MissingExtraError(EtudeError, ImportError, exit_code=8):
    """An optional package is needed and absent; the message names the extra to install."""


class RolloutError(EtudeError, exit_code=10):
    """No rollout succeeded, or one failed where the configuration says to stop."""


class DirectoryInUseError(EtudeError, exit_code=11):
    """Another training is writing the same directory."""


class ServiceError(EtudeError, exit_code=12):
    """A training service is away, too slow, or refused what was asked of it."""


class RobotError(EtudeError, exit_code=13):
    """A robot died, hangs, shows nothing new, or refused what was asked of it; it was told to stop."""


class ControlError(EtudeError, exit_code=14):
    """A control loop had no plan in time, missed too many steps, or met a strict limit; it stopped the robot."""


class Interrupted(SystemExit):
    """A signal asked to stop; the run was saved. Exits with 128 + signal number (129, 130 or 143)."""

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.message = message or f"interrupted by {signal.Signals(signum).name}"


def describe_exit(leave: SystemExit) -> str:
    """Return what asked a process to exit, and where: `sys.exit(0) in model.py, line 12`."""
    frames = [f for f in traceback.extract_tb(leave.__traceback__) if "_sitebuiltins" not in f.filename]
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"sys.exit({'' if leave.code is None else repr(leave.code)}){place}"


@contextmanager
def exits_refused(reached: Callable[[], str]) -> Iterator[None]:
    """Turn a `sys.exit` of the code that is trained into ShortRunError: an early end must not look like a good one.

    Args:
        reached: Says how far training had come, such as "step 3, before the requested 10 steps".
    """
    try:
        yield
    except SystemExit as leave:
        # Interrupted and its like are classes of their own; Lightning leaves by exit(1) after Control-C.
        if type(leave) is not SystemExit or isinstance(leave.__context__, KeyboardInterrupt):
            raise
        raise ShortRunError(f"training ended at {reached()}: the code called {describe_exit(leave)}") from leave
