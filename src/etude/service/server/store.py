"""What a service knows, in one SQLite file: who asked for what, in which order, and what came of it.

A request is in here before its client hears of it, and a result before anybody can fetch it. Weights are files beside
it (`weights/`), each written once and named by nothing but a row of a table.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from etude.errors import CheckpointError, ConfigError, no_place
from etude.runs.durable import remove_leftovers, write_atomically
from etude.runs.lock import DirectoryLock
from etude.runs.tensor_file import file_parts, read_tensor_file

VERSION = 1
_TABLES = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, owner TEXT, created REAL, seen REAL, about TEXT);
CREATE TABLE models (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, base TEXT, adapter TEXT, about TEXT, created REAL, asked REAL,
    next_seq INTEGER DEFAULT 0, steps INTEGER DEFAULT 0, snapshot TEXT, snapshot_seq INTEGER DEFAULT -1,
    unloaded INTEGER DEFAULT 0, loss REAL);
CREATE TABLE requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, target TEXT, seq INTEGER, kind TEXT,
    payload BLOB, digest TEXT, state TEXT, result BLOB, error TEXT, category TEXT, status INTEGER, created REAL,
    finished REAL, finish INTEGER, UNIQUE (target, seq));
CREATE INDEX by_state ON requests (state, number);
CREATE INDEX by_finish ON requests (target, finish);
CREATE TABLE checkpoints (
    model TEXT, kind TEXT, name TEXT, owner TEXT, file TEXT, base TEXT, adapter TEXT, created REAL, expires REAL,
    public INTEGER DEFAULT 0, size INTEGER, about TEXT, PRIMARY KEY (model, kind, name));
CREATE TABLE samplers (
    id TEXT PRIMARY KEY, owner TEXT, session TEXT, model TEXT, base TEXT, adapter TEXT, path TEXT, file TEXT,
    created REAL, ephemeral INTEGER DEFAULT 0);
CREATE TABLE curves (model TEXT, name TEXT, step INTEGER, value REAL, PRIMARY KEY (model, name, step)) WITHOUT ROWID;
"""

_LATEST = """
SELECT MAX(COALESCE((SELECT MAX(created) FROM checkpoints), 0), COALESCE((SELECT MAX(created) FROM samplers), 0)) AS at
"""
"""When weights were last kept: what is kept next is newer, whatever the clock says."""


class Store:
    """The state of one service; one process at a time has it open."""

    def __init__(self, folder: Path) -> None:
        try:
            self.weights = folder / "weights"
            self.weights.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise no_place(error, folder) from None
        self.folder = folder
        self._held = DirectoryLock(folder, holder="service")
        try:
            self._held.acquire()
        except OSError as error:
            raise no_place(error, folder) from None
        self._lock = threading.RLock()
        try:
            self._open(folder / "service.db")
            self._finish = int(self.one("SELECT COALESCE(MAX(finish), 0) AS n FROM requests")["n"])
            self._now = float(self.one(_LATEST)["at"])
        except sqlite3.DatabaseError as error:
            self._held.release()
            raise CheckpointError(f"{folder / 'service.db'} cannot be used: {error}") from None
        except ConfigError:
            self.close()
            raise
        remove_leftovers(self.weights)
        self._drop_orphans()

    def _open(self, path: Path) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if not found:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")
        elif found != VERSION:
            raise ConfigError(f"{path} is of version {found}, and this etude reads version {VERSION}")

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            self._db.close()
        self._held.release()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Context of one transaction: all of it is on the disk at the end, or none."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends some transactions by itself, and leaves others open
                    self._db.execute("ROLLBACK")
                raise

    def all(self, query: str, *given: Any) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with self._lock:
            return self._db.execute(query, given).fetchall()

    def find(self, query: str, *given: Any) -> sqlite3.Row | None:
        """Return the first row of a query, if there is one."""
        with self._lock:
            found: sqlite3.Row | None = self._db.execute(query, given).fetchone()
            return found

    def one(self, query: str, *given: Any) -> sqlite3.Row:
        """Return the first row of a query, which there must be."""
        found = self.find(query, *given)
        assert found is not None
        return found

    def insert(self, table: str, row: Mapping[str, Any], *, db: sqlite3.Connection, replace: bool = False) -> None:
        """Add a row, in a transaction."""
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        how = "INSERT OR REPLACE" if replace else "INSERT"
        db.execute(f"{how} INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))

    def now(self) -> float:
        """Return the time to write down: later than every one before, also where the clock went back."""
        with self._lock:
            self._now = max(time.time(), self._now + 1e-6)
            return self._now

    # ---- requests ----------------------------------------------------------------------------------------------------

    def finish(
        self,
        db: sqlite3.Connection,
        request: str,
        *,
        result: bytes | None = None,
        error: str | None = None,
        category: str = "user",
        state: str = "",
    ) -> None:
        """Record, in a transaction, what a request came to."""
        self._finish += 1
        db.execute(
            "UPDATE requests SET state=?, result=?, error=?, category=?, finished=?, finish=? WHERE id=?",
            (
                state or ("failed" if error else "done"), result, error, category if error else None, time.time(),
                self._finish, request,
            ),
        )  # fmt: skip

    def forget_results(self, before: float) -> None:
        """Drop results that were there to be fetched for long enough, and what was to be drawn for them."""
        with self.writing() as db:
            db.execute(
                "UPDATE requests SET result=NULL, payload=CASE kind WHEN 'sample' THEN NULL ELSE payload END "
                "WHERE finished<? AND kind!='create_model'",
                (before,),
            )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def write_weights(self, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
        """Write tensors as a new file, on the disk when this returns; return its name and size."""
        name = f"{secrets.token_hex(12)}.safetensors"
        path = self.weights / name
        write_atomically(path, *file_parts({key: value.detach().contiguous() for key, value in tensors.items()}))
        return name, path.stat().st_size

    def read_weights(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a file."""
        try:
            return read_tensor_file(self.weights / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the weights {name} cannot be read: {error}") from None

    def drop_unused(self, names: Sequence[str | None]) -> None:
        """Remove those of some files that no row names any longer."""
        used = self._used()
        for name in names:
            if name and name not in used:
                (self.weights / name).unlink(missing_ok=True)

    def _drop_orphans(self) -> None:
        """Remove what a kill left between a file and its row."""
        self.drop_unused([path.name for path in self.weights.glob("*.safetensors")])

    def _used(self) -> set[str]:
        query = "SELECT snapshot AS f FROM models UNION SELECT file FROM checkpoints UNION SELECT file FROM samplers"
        return {str(row["f"]) for row in self.all(query) if row["f"]}
