"""Files that survive a crash: written aside, hashed while written, fsynced, put in place by one rename."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from etude.errors import ConfigError, no_place, one_line

# Hashes and os.write release the GIL once per chunk: large chunks leave the training thread alone, and 4 MiB still
# fit a cache, so that the bytes just hashed need not come from memory again to be written.
CHUNK_BYTES = 4 << 20

_TEMP = re.compile(r"^\.tmp-.+-(?P<pid>\d+)(?:@(?P<host>.+))?$")
_FOREIGN_LEFTOVER_S = 24 * 3600.0  # Another host's process cannot be asked whether it lives; its age can.
_HOST = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "localhost"
_in_use: set[Path] = set()


class Hash(Protocol):
    """What hashes bytes as they come."""

    def update(self, data: Any, /) -> None:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """Return the hash of what came so far."""


# One core here hashes 1.8 GB/s with the CPU's own SHA-256 instructions (0.4 without), 4.4 with BLAKE3, 23 with XXH3,
# and copies 11. A manifest finds damage; whoever may write the files may write their hashes too, so that a hash which
# withstands an attacker would protect nothing more.
_HASHES: dict[str, Callable[[], Hash]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be: its size, and its hash by the kind that is named."""

    digest: str
    size_bytes: int
    kind: str = "xxh3_128"

    def new_hash(self) -> Hash:
        """Return what computes a hash of this kind."""
        return _HASHES[self.kind]()

    def to_json(self) -> dict[str, Any]:
        """Return this as plain values; the name of the hash says its kind."""
        return {self.kind: self.digest, "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, entry: Any) -> FileRecord:
        """Read what `to_json` returned; raise LookupError if it names no known hash."""
        kind = next((kind for kind in _HASHES if kind in entry), "xxh3_128")
        return cls(str(entry[kind]), int(entry["size_bytes"]), kind)


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, fsync it and drop it from the cache, so that re-reading tells the truth; return its hash."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                digest.update(chunk)
                size_bytes += len(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return FileRecord(digest.hexdigest(), size_bytes)


def sync_hashed(path: Path) -> FileRecord:
    """Make a file that somebody else wrote durable, and return its hash."""
    _fsync(path, os.O_RDONLY)
    return hash_file(path)


def hash_file(path: Path, kind: str = "xxh3_128") -> FileRecord:
    """Return the hash and size of a regular file, reading it once in large chunks."""
    digest = _HASHES[kind]()
    with open_regular(path) as file:
        size_bytes = feed(file, digest)
    return FileRecord(digest.hexdigest(), size_bytes, kind)


def feed(file: io.FileIO, digest: Hash) -> int:
    """Let the rest of a file pass through a hash, in large chunks; return how many bytes that were."""
    size_bytes = 0
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(os.fstat(file.fileno()).st_size, 1))))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        size_bytes += count
    return size_bytes


def open_regular(path: Path) -> io.FileIO:
    """Open a file for unbuffered reading; refuse pipes and devices, which could block or never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    return io.FileIO(path)


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replace a file's content in one step: readers and crashes see the old or the new, never a half of it."""
    temp = path.parent / temp_name(path.name)
    temp.unlink(missing_ok=True)
    try:
        write_hashed(temp, parts)
        os.replace(temp, path)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_output(path: Path, content: str | bytes) -> Path:
    """Write a file where a user wants it, folders included, and return the path; a refusal is one sentence.

    What is there and is no file (`/dev/stdout`, a pipe) is written to, not replaced.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as stream:
                stream.write(data)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
    except OSError as error:
        raise _refused(error, path) from None
    return path


def require_place(path: Path) -> None:
    """Make the folder of a file that is to be written; refuse a place that takes none before work is done for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists():
            temp = path.parent / temp_name(path.name)
            temp.touch()
            temp.unlink()
    except OSError as error:
        raise _refused(error, path) from None


def _refused(error: OSError, path: Path) -> ConfigError:
    # By the name that was given: that of a file written aside tells nobody anything.
    return no_place(OSError(error.errno, error.strerror or one_line(error)), path)


def fsync_directory(directory: Path) -> None:
    """Make renames and new names inside a directory durable."""
    _fsync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def swap_symlink(link: Path, target: str) -> None:
    """Point a relative symlink at `target` in one step."""
    if link.is_symlink() and os.readlink(link) == target:
        return
    temp = link.parent / temp_name(link.name)
    temp.unlink(missing_ok=True)
    os.symlink(target, temp)
    os.replace(temp, link)


def discard(path: Path) -> None:
    """Remove a directory so that a crash leaves all of it or a leftover, never a part under its own name."""
    trash = path.parent / temp_name(f"trash-{path.name}")
    remove(trash)
    os.rename(path, trash)
    remove(trash)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory tree, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def temp_name(what: str) -> str:
    """Return a hidden name for work in progress that says whose it is."""
    return f".tmp-{what}-{os.getpid()}@{_HOST}"


class in_use:
    """Context in which a temporary path is safe from `remove_leftovers` of this process; it is gone afterwards."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        _in_use.add(self._path)
        return self._path

    def __exit__(self, *_: object) -> None:
        remove(self._path)
        _in_use.discard(self._path)


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that no longer live left half done in a directory."""
    try:
        leftovers = [entry for entry in directory.iterdir() if _is_leftover(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in leftovers:
        try:
            remove(entry)
        except OSError:  # A reader of somebody else's run need not be allowed to tidy it.
            continue


def process_alive(pid: int) -> bool:
    """Tell whether a process of this host lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_this_host(name: str) -> bool:
    """Tell whether a host name recorded earlier is this machine's."""
    return name == socket.gethostname()


def _is_leftover(path: Path) -> bool:
    match = _TEMP.match(path.name)
    if not match or path in _in_use:
        return False
    if match["host"] not in (None, _HOST):
        try:
            return time.time() - path.lstat().st_mtime > _FOREIGN_LEFTOVER_S
        except FileNotFoundError:
            return False
    pid = int(match["pid"])
    return pid == os.getpid() or not process_alive(pid)
