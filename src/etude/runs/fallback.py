"""What every writer of checkpoints does when one is damaged, or of a history that the run has left."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from etude.errors import CheckpointError
from etude.runs.manifest import DamagedCheckpointError

_warn = logging.getLogger("etude").warning


class _Saved(Protocol):
    @property
    def step(self) -> int: ...


_Checkpoint = TypeVar("_Checkpoint", bound=_Saved)


def first_good(
    paths: Iterable[Path],
    read: Callable[[Path], _Checkpoint],
    where: object,
    *,
    what: str = "no checkpoint",
    say: Callable[[str], None] = _warn,
) -> _Checkpoint:
    """Return the first checkpoint that is whole, saying loudly what was wrong with those before it.

    Args:
        paths: Where checkpoints are, the one to prefer first.
        read: Verifies and loads one; raises DamagedCheckpointError if it is not whole.
        where: What holds them, for the error if none is whole.
        what: What is missing then.
        say: Gets one sentence for each damaged one, and one for what is used instead.
    """
    damage = ""
    for path in paths:
        try:
            found = read(path)
        except DamagedCheckpointError as error:
            damage = f"; the last problem: {error}"
            say(f"{error}; looking for an older checkpoint")
            continue
        if damage:
            say(f"using {path.name} (step {found.step}) instead")
        return found
    raise CheckpointError(f"{what} in {where} can be loaded{damage}")


def put_aside(path: Path) -> Path:
    """Rename a checkpoint to `old-...`, which nothing loads by itself, and return where it is now."""
    target, revision = path.with_name(f"old-{path.name}"), 0
    while os.path.lexists(target):
        revision += 1
        target = path.with_name(f"old-{path.name}-{revision}")
    os.rename(path, target)
    return target
