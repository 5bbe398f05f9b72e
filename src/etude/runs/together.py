"""One checkpoint that several ranks write: each its own files, one folder, one manifest, one rename.

Every step of the way ends with all ranks knowing whether it went well everywhere, so that none waits for one that has
given up. It runs in the background of each rank, on a channel that training does not use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from etude.errors import CheckpointError
from etude.runs import durable
from etude.runs.folder import STATE_NAME, Staged, move, seal, settle, write_files
from etude.runs.manifest import read_manifest, verify_files


class Peers(Protocol):
    """The ranks that write together."""

    @property
    def rank(self) -> int:
        """Which of them we are."""

    @property
    def world(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-able value of every rank, in rank order."""


def write_together(peers: Peers, staged: Staged, final: Path, step: int, metric: float | None, info: Any) -> None:
    """Write this rank's files of a checkpoint; rank 0 adds the rest and puts it in place.

    What was written is read back by whoever wrote it, in its place, before an older one goes. An error of one rank is
    raised on all.
    """
    with ExitStack() as exits:
        temp = Path(_agree(peers, lambda: _begin(final, exits) if peers.rank == 0 else None)[0])
        written: dict[str, durable.FileRecord] = {}

        def write() -> dict[str, Any]:
            if not temp.is_dir():
                raise CheckpointError(f"{temp.parent} must be on a file system that all ranks share; this one has none")
            written.update(write_files(temp, staged))
            return {name: record.to_json() for name, record in written.items()}

        everything = _agree(peers, write)
        older: list[Path] = []

        def put_in_place() -> str:
            files = {name: durable.FileRecord.from_json(e) for of_rank in everything for name, e in of_rank.items()}
            seal(temp, staged, files, step, metric, info)
            target, found = move(temp, final)
            older.extend(found)
            return str(target)

        target = Path(_agree(peers, put_in_place if peers.rank == 0 else lambda: None)[0])
        try:
            # Rank 0 reads the manifest and the state too: together, the ranks read every byte once.
            _agree(peers, lambda: _verify(target, written, whole=peers.rank == 0))
        except CheckpointError:
            if peers.rank == 0:
                durable.discard(target)
            raise
        if peers.rank == 0:
            settle(target, final, older)


def _begin(final: Path, exits: ExitStack) -> str:
    final.parent.mkdir(parents=True, exist_ok=True)
    durable.remove_leftovers(final.parent)
    temp = exits.enter_context(durable.in_use(final.parent / durable.temp_name(final.name.removeprefix("step-"))))
    temp.mkdir()
    return str(temp)


def _verify(target: Path, written: dict[str, durable.FileRecord], *, whole: bool) -> None:
    listed = read_manifest(target).files if whole else {}
    verify_files(target, {**written, **{name: listed[name] for name in (STATE_NAME,) if whole}})


def _agree(peers: Peers, work: Callable[[], Any]) -> list[Any]:
    """Return what the function returned on every rank; raise on all what was raised on any."""
    try:
        found: list[Any] = [work(), None]
    except OSError as error:
        found = [None, f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")]
    except CheckpointError as error:
        found = [None, str(error)]
    try:
        everyone = peers.gather(found)
    except RuntimeError as error:  # the group's channel broke: a rank has gone
        raise CheckpointError(f"a rank was lost while it was written ({str(error).splitlines()[0]})") from error
    for rank, (_, fault) in enumerate(everyone):
        if fault is not None:
            raise CheckpointError(fault if peers.rank == rank else f"rank {rank}: {fault}")
    return [value for value, _ in everyone]
