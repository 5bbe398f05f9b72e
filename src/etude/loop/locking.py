"""Directories that one training of several ranks has for itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from etude.loop.distributed import Group
from etude.runs.lock import DirectoryLock

log = logging.getLogger("etude")


@contextmanager
def locked(group: Group, *directories: Path) -> Iterator[None]:
    """Keep other trainings out of directories: rank 0 locks them, and all ranks learn why it cannot."""
    with ExitStack() as stack:

        def lock() -> None:
            for directory in directories:
                stack.enter_context(DirectoryLock(directory, log.warning))

        group.ask_main(lock)
        yield
