"""The journal of a recording: which attempt became which episode, so that an interrupted recording goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from etude.errors import DataError
from etude.runs.durable import write_atomically

JOURNAL_NAME: Final = "etude_recording.json"


class Journal:
    """Attempts by episode, written before an episode is saved: what is on disk then tells whether it was."""

    def __init__(self, root: Path, settings: Mapping[str, Any], saved: int) -> None:
        """Open the journal of a dataset.

        Args:
            root: The dataset.
            settings: What the episodes depend on; a recording with other settings does not mix with this one.
            saved: Episodes that the dataset has.
        """
        self._path = root / JOURNAL_NAME
        self._settings = dict(settings)
        self.kept: list[int] = []
        """The attempt that became each episode."""
        self.failed: list[list[int]] = []
        """Attempts that came to nothing, as [environment, attempt]."""
        if self._path.exists():
            self._read()
        if saved > len(self.kept):
            raise DataError(
                f"{root}: holds {saved} episodes, of which {saved - len(self.kept)} were not recorded by this command; "
                "choose another folder"
            )
        del self.kept[saved:]

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            before, self.kept, self.failed = found["settings"], list(found["kept"]), list(found["failed"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path}: the journal of the recording cannot be read ({error})") from error
        changed = [key for key in self._settings if before.get(key) != self._settings[key]]
        if changed:
            key = changed[0]
            raise DataError(
                f"{self._path.parent}: was recorded with {key}={before.get(key)!r}, not {self._settings[key]!r}; "
                "choose another folder, or delete it"
            )

    def next_attempt(self, lane: int, lanes: int) -> int:
        """Return the number of the next attempt in one of several environments that take turns."""
        tried = [*self.kept[lane::lanes], *(attempt for where, attempt in self.failed if where == lane)]
        return max(tried, default=-1) + 1

    def fail(self, lane: int, attempt: int) -> None:
        """Note an attempt that came to nothing."""
        self.failed.append([lane, attempt])

    def keep(self, attempt: int) -> None:
        """Note, durably, that an attempt is about to be saved as the next episode."""
        self.kept.append(attempt)
        content = {"settings": self._settings, "kept": self.kept, "failed": self.failed}
        write_atomically(self._path, json.dumps(content).encode())
