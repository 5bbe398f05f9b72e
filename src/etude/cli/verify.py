"""`etude verify`: the same run twice, in fresh processes, must end with the same parameters, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from etude.cli.output import say
from etude.errors import CheckpointError, EtudeError


class NotReproducibleError(EtudeError, exit_code=9):
    """Two runs of one configuration ended with different parameters."""


def verify_config(config: Path, overrides: list[str], *, steps: int) -> None:
    """Train `steps` steps twice and compare the hashes of the parameters."""
    from etude.config.load import load

    load(config, overrides)  # mistakes are reported here, once, without starting a process
    with tempfile.TemporaryDirectory(prefix="etude-verify-") as folder:
        found = []
        for number in (1, 2):
            hashes = hash_parameters(_train_once(config, overrides, steps, Path(folder) / str(number)))
            say(f"run {number}: {digest_of(hashes)}  ({len(hashes)} tensors after {steps} steps)")
            found.append(hashes)
    first, second = found
    differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if differing:
        raise NotReproducibleError(
            f"{config}: two runs of {steps} steps differ in {len(differing)} of {len(first)} tensors, first "
            f"{differing[0]!r}; look for randomness or time that does not come from the training seed"
        )
    say("equal: every parameter is the same, bit for bit")


def hash_parameters(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every tensor (type, shape and bytes) of a safetensors file, without torch."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        hashes = {}
        for name, entry in sorted(header.items()):
            if name == "__metadata__":
                continue
            low, high = entry["data_offsets"]
            digest = hashlib.sha256(f"{entry['dtype']} {entry['shape']} ".encode())
            file.seek(start + low)
            digest.update(file.read(high - low))
            hashes[name] = digest.hexdigest()
    return hashes


def digest_of(hashes: dict[str, str]) -> str:
    """Return one SHA-256 for all tensors by name."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _train_once(config: Path, overrides: list[str], steps: int, root: Path) -> Path:
    command = [
        sys.executable, "-m", "etude", "train", str(config), *overrides, f"training.training_steps={steps}",
        "training.duration=null", "training.early_stopping=null", "loggers=[]", f"run.root={root}", "run.name=verify",
        "--resume", "never",
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise typer.Exit(done.returncode)
    saved = sorted(root.glob("*/checkpoints/last/policy.safetensors"))
    if not saved:
        raise CheckpointError(f"{config}: the run left no checkpoint with policy parameters to compare")
    return saved[0]


def _environment() -> dict[str, str]:
    # A child of a torchrun worker must not join the group of its parent.
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in group}
