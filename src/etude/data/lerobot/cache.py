"""A cache directory per dataset: entries keyed by content, built once under a lock, put in place by one rename."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import DataError
from etude.runs.cache import cache_directory
from etude.runs.durable import hash_file, in_use, remove, remove_leftovers, temp_name, write_atomically

log = logging.getLogger("etude.data")

_HASHES = "hashes.json"
_ROOT = "root.json"


class Cache:
    """Derived files of one dataset.

    Args:
        root: The dataset.
        directory: Where caches of all datasets go; `cache_directory()` if None.
    """

    def __init__(self, root: Path, directory: Path | str | None = None) -> None:
        self.root = root.resolve()
        base = Path(directory) if directory is not None else cache_directory()
        place = hashlib.sha256(str(self.root).encode()).hexdigest()[:12]
        self.directory = base / "lerobot" / f"{self.root.name[:40]}-{place}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not (self.directory / _ROOT).exists():
                _forget_lost_datasets(base / "lerobot")
                write_atomically(self.directory / _ROOT, json.dumps({"root": str(self.root)}).encode())
        except OSError as error:
            self.directory = Path(tempfile.mkdtemp(prefix="etude-cache-"))
            log.warning("%s cannot be written (%s); caching in %s for now", base, error.strerror, self.directory)
        remove_leftovers(self.directory)

    def hash_files(self, paths: Iterable[Path]) -> dict[Path, str]:
        """Return the SHA-256 of files; those that have not changed since the last time are not read again."""
        try:
            known = json.loads((self.directory / _HASHES).read_text())
        except (OSError, ValueError):
            known = {}
        known = known if isinstance(known, dict) else {}
        found, before = {}, dict(known)
        for path in dict.fromkeys(paths):
            try:
                facts = path.stat()
                state = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
                entry = known.get(str(path))
                if not isinstance(entry, list) or entry[:-1] != state:
                    entry = [*state, hash_file(path, "sha256").digest]
            except FileNotFoundError:
                raise DataError(
                    f"{path}: no such file; the dataset is not complete, so fetch or record it again"
                ) from None
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
            known[str(path)] = entry
            found[path] = str(entry[-1])
        if known != before:
            write_atomically(self.directory / _HASHES, json.dumps(known).encode())
        return found

    def get(self, kind: str, key: Any, build: Callable[[Path], None]) -> Path:
        """Return the directory of an entry, calling `build(directory)` to fill a new one if it is not there.

        Other entries of the same kind are dropped: they belong to an earlier state of the dataset.
        """
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        entry = self.directory / f"{kind}-{digest}"
        if entry.is_dir():
            return entry
        with self._locked():
            if entry.is_dir():  # another process was faster
                return entry
            temp = self.directory / temp_name(entry.name)
            with in_use(temp):
                remove(temp)
                temp.mkdir()
                build(temp)
                os.rename(temp, entry)
            for stale in self.directory.glob(f"{kind}-*"):
                if stale != entry:
                    remove(stale)
        return entry

    def drop(self, entry: Path) -> None:
        """Remove an entry that turned out to be unusable."""
        remove(entry)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _forget_lost_datasets(directory: Path) -> None:
    """Drop the caches of datasets that are gone."""
    for entry in directory.iterdir():
        try:
            root = Path(json.loads((entry / _ROOT).read_text())["root"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not root.exists():
            remove(entry)
