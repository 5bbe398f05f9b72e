"""The lock of a directory that one training writes: held by its process alone, released by its end, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from etude.errors import DirectoryInUseError

LOCK_NAME = ".lock"
_BUSY = (errno.EAGAIN, errno.EACCES)
_held: set[int] = set()


class DirectoryLock:
    """Keeps every other training, of this process too, out of a directory; who reads is not asked.

    The lock belongs to the open file (flock), so the system drops it with the process: nothing is left to clean up
    after a SIGKILL. Where a file system has no locks, that is a warning.

    Args:
        directory: What is written by one alone.
        on_warning: What to do with a warning; it is logged unless given.
        holder: What holds it, as the message to the next one calls it.
    """

    def __init__(
        self, directory: Path | str, on_warning: Callable[[str], None] | None = None, holder: str = "training"
    ) -> None:
        self.directory, self.holder = Path(directory), holder
        self._warn = on_warning or logging.getLogger(__name__).warning
        self._path = self.directory / LOCK_NAME
        self._descriptor = -1

    def acquire(self) -> None:
        """Take the lock, or raise DirectoryInUseError that names the process which has it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(descriptor)
                if _is_at(self._path, descriptor):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the last holder removed the file between our opening and our locking it
        self._descriptor = descriptor
        _held.add(descriptor)
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with suppress(OSError):  # a full disk: the lock holds all the same, only without a name on it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(note).encode(), 0)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                raise DirectoryInUseError(
                    f"another {self.holder}{_who(descriptor)} is writing {self.directory}; wait for it, end it, or "
                    "give this one a directory of its own"
                ) from None
            self._warn(
                f"{self.directory} cannot be locked ({error.strerror}): make sure that no other {self.holder} writes "
                "there"
            )

    def release(self) -> None:
        """Let others in; releasing twice is fine."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink()  # while it is ours: whoever opened it meanwhile will look again
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _who(descriptor: int) -> str:
    try:
        note: Any = json.loads(os.pread(descriptor, 4096, 0))
        return f" (process {int(note['pid'])} on {note['host']})"
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _drop_in_child() -> None:
    # A data worker that outlives its killed parent must not keep the run locked; closing its copy unlocks nothing.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
