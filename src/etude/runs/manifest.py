"""The manifest of a checkpoint: which files it has and what each must hash to. It guards itself as well."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError
from etude.runs.durable import FileRecord, Hash, feed, hash_file, open_regular

WHOLE_VERSION, SHARDED_VERSION = 2, 3
SCHEMA_VERSION = SHARDED_VERSION
"""1 listed SHA-256 hashes; 2 lists hashes of any known kind; 3 has tensors in the files of several ranks."""
MANIFEST_NAME = "manifest.json"
STEP_NAME = re.compile(r"^(step-(?=\d{8})|checkpoint-)(\d+)(?:-r(\d+))?$")
"""Names of checkpoint directories, ours and those of transformers; a revision (-r1) exists while, or when a crash came
while, a step is replaced."""

# No separators and two known endings: what is read can never lie outside the directory, nor be a pickle.
FILE_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json)$")
_MAX_MANIFEST_BYTES = 64 << 20


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, truncated or altered."""

    def __init__(self, directory: Path, file: str, problem: str) -> None:
        super().__init__(f"checkpoint {directory}: {file} {problem}")
        self.directory, self.file, self.problem = directory, file, problem


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is and what its files must be."""

    step: int
    metric: float | None
    info: Any
    """Facts of the caller, as the JSON skeleton of `runs.tree`."""
    files: dict[str, FileRecord]
    others: dict[str, FileRecord] = field(default_factory=dict)
    """Files that must be whole too, though Etude never reads them: a vocabulary, an adapter in a folder of its own."""
    schema_version: int = WHOLE_VERSION

    def dump(self) -> bytes:
        """Return the one byte string that stands for this manifest."""
        metric = self.metric
        others = {name: file.to_json() for name, file in self.others.items()}
        body = {
            "schema_version": self.schema_version,
            "step": self.step,
            "metric": metric if metric is None or abs(metric) < float("inf") else repr(metric),
            "info": {**self.info, "others": others} if others else self.info,
            "files": {name: file.to_json() for name, file in self.files.items()},
        }
        return _seal(body)


def read_manifest(directory: Path) -> Manifest:
    """Return a checkpoint's manifest; refuse a damaged one and one from a newer Etude."""
    path = directory / MANIFEST_NAME
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpointError(directory, MANIFEST_NAME, "is missing; this is no Etude checkpoint") from None
    except OSError as error:
        raise DamagedCheckpointError(directory, MANIFEST_NAME, f"cannot be read ({error})") from None
    try:
        body = json.loads(raw)["body"]
        intact = _seal(body) == raw
    except (ValueError, LookupError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedCheckpointError(directory, MANIFEST_NAME, "is damaged: it does not match its own SHA-256")
    manifest = _read_body(directory, body)
    named = STEP_NAME.match(directory.name)
    if named and int(named[2]) != manifest.step:
        raise DamagedCheckpointError(directory, MANIFEST_NAME, f"belongs to step {manifest.step}, not to this one")
    return manifest


def verify(directory: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest and return the manifest."""
    manifest = read_manifest(directory)
    verify_files(directory, {**manifest.files, **manifest.others})
    return manifest


def verify_files(directory: Path, files: Mapping[str, FileRecord]) -> None:
    """Check that files are as they are listed."""
    for name, expected in files.items():
        with open_listed(directory, name, expected) as (file, digest):
            feed(file, digest)


@contextmanager
def open_listed(directory: Path, name: str, expected: FileRecord) -> Iterator[tuple[io.FileIO, Hash]]:
    """Open a file of a checkpoint to be read once, whole, and fed to the hash; at the end it must be as expected.

    What the reader makes of the bytes must not be used before. A complaint of the reader's about a file that is damaged
    becomes a complaint about the damage.
    """
    try:
        with open_regular(directory / name) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != expected.size_bytes:
                problem = f"is damaged: it has {size_bytes} bytes instead of {expected.size_bytes}"
                raise DamagedCheckpointError(directory, name, problem)
            digest = expected.new_hash()
            try:
                yield file, digest
                is_whole = digest.hexdigest() == expected.digest
            except ValueError:
                is_whole = hash_file(directory / name, expected.kind) == expected
                if is_whole:
                    raise
            if not is_whole:
                raise DamagedCheckpointError(directory, name, "is damaged: its hash differs from the manifest")
    except FileNotFoundError:
        raise DamagedCheckpointError(directory, name, "is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(directory, name, f"cannot be read ({error})") from None


def _read_body(directory: Path, body: Any) -> Manifest:
    try:
        version = body["schema_version"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"schema_version {version!r}")
        if version > SCHEMA_VERSION:
            raise CheckpointError(
                f"checkpoint {directory} has schema version {version}, this Etude reads up to {SCHEMA_VERSION}; "
                "upgrade with pip install -U etude"
            )
        files = {name: FileRecord.from_json(entry) for name, entry in body["files"].items()}
        for name in files:
            if not FILE_NAME.match(name) or name == MANIFEST_NAME:
                raise ValueError(f"file name {name!r}: only .safetensors and .json files beside it are read")
        metric, info = body["metric"], body["info"]
        step = int(body["step"])
        others = _read_others(info.pop("others", {})) if isinstance(info, dict) else {}
        return Manifest(step, None if metric is None else float(metric), info, files, others, version)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpointError(directory, MANIFEST_NAME, f"is not a manifest ({error})") from None


def _read_others(listed: Any) -> dict[str, FileRecord]:
    for name in listed:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"file name {name!r}: only files inside the checkpoint belong to it")
    # Checkpoints of the first schema list the SHA-256 and the size.
    return {
        name: FileRecord(str(entry[0]), int(entry[1]), "sha256")
        if isinstance(entry, list)
        else FileRecord.from_json(entry)
        for name, entry in listed.items()
    }


def _seal(body: Any) -> bytes:
    text = json.dumps(body, indent=1, allow_nan=False)
    sealed = {"body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n"
