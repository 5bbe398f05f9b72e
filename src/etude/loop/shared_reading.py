"""A checkpoint that the ranks of a sharded policy take up: together they verify it, and each reads what it holds."""

from __future__ import annotations

from pathlib import Path

from etude.loop.distributed import Group
from etude.runs.checkpoint import Checkpoint, open_checkpoint
from etude.runs.manifest import DamagedCheckpointError, read_manifest, verify_files

ON_DISK = ("policy", "optimizer", "ema", "shown")
"""What grows with the policy: of it, a rank reads its own rows when it needs them."""


def read_together(group: Group, directory: Path) -> Checkpoint:
    """Verify and load a checkpoint; every rank must call, and hashes one file in `world` of them.

    Damage that one rank finds is raised on all.
    """
    try:
        manifest = read_manifest(directory)
        files = {**manifest.files, **manifest.others}
        verify_files(directory, {name: files[name] for name in sorted(files)[group.rank :: group.world]})
        fault = None
    except DamagedCheckpointError as error:
        fault = [error.file, error.problem]
    for found in group.gather(fault):
        if found is not None:
            raise DamagedCheckpointError(directory, *found)
    return open_checkpoint(directory, ON_DISK)
