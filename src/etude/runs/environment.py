"""Where a run ran: versions, machine, git state and command line; never the values of environment variables."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.secrets import MASK, redact

_GIT_TIMEOUT_S = 10.0
_DIST_INFO = re.compile(r"(.+)-([^-]+)\.dist-info")
_SECRET_NAME = re.compile(r"(?i)(token|secret|passw(or)?d|api[_-]?key|access[_-]?key|credential)")


def describe_environment(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what someone needs to know to repeat a run elsewhere."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "working_directory": redact(os.getcwd()),
        "argv": redact_argv(sys.argv if argv is None else argv),
        "git": git_state(Path.cwd()),
        "torch": _torch_state(),
        "packages": _packages(),
    }


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line without registered secrets and without the values of options that are named like one."""
    shown: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        named_like_secret = bool(_SECRET_NAME.search(name))
        if hide_next and not argument.startswith("-"):
            shown.append(MASK)
        elif equals and named_like_secret:
            shown.append(f"{redact(name)}={MASK}")
        else:
            shown.append(redact(argument))
        hide_next = argument.startswith("-") and not equals and named_like_secret
    return shown


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether files differ from it; None outside a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    status = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if commit is None:
        return None
    branch = _git(directory, "rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit, "branch": branch, "dirty": status is None or bool(status)}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _packages() -> dict[str, str]:
    # From the names of the dist-info directories: parsing every package's metadata takes a quarter of a second.
    found: dict[str, str] = {}
    for directory in sys.path:
        for name in os.listdir(directory or ".") if os.path.isdir(directory or ".") else ():
            match = _DIST_INFO.fullmatch(name)
            if match:
                found.setdefault(match[1].replace("_", "-"), match[2])
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _torch_state() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    cuda = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
