"""`make setup`: says what it is doing while it does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_venv.py"
PIP = """#!/bin/sh
case "$*" in
  *[[]broken[]]*) echo "no such package" >&2; exit 1 ;;
  *build-isolation*)
    echo "Collecting torch"
    echo "  Downloading https://files/torch-2.9.0-cp311.whl (181.0 MB)"
    echo "  Downloading tiny-1.0.whl (1.5 MB)"
    echo "Installing collected packages: torch, tiny, etude" ;;
  *--target*old==1.0) for last; do :; done; while [ "$1" != --target ]; do shift; done; mkdir -p "$2/$last" ;;
  *--target*) echo "no way to fetch it"; exit 1 ;;
esac
"""


def set_up(root: Path, *extras: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a project whose Python answers at once."""
    (root / "scripts").mkdir(parents=True, exist_ok=True)
    (root / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text(encoding="utf-8"))
    (root / "pyproject.toml").write_text("[project.optional-dependencies]\ndev = []\nbroken = []\nservice = []\n")
    (root / "requirements.lock").write_text("")
    (root / "clients.lock").write_text("# older ones\nold==1.0\nfar==2.0\n")
    (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("python", "pip"):
        (root / ".venv" / "bin" / name).write_text(PIP)
        (root / ".venv" / "bin" / name).chmod(0o755)
    command = [sys.executable, str(root / "scripts" / SCRIPT.name), *extras]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_every_stage_and_large_download_is_a_line(tmp_path: Path) -> None:
    done = set_up(tmp_path, "dev")
    assert done.returncode == 0, done.stderr
    assert [line.split(" s  ")[1].split(",")[0] for line in done.stdout.splitlines()] == [
        "etude[dev] into .venv (once; a minute or two",
        "build tools",
        "etude and what it needs",
        "downloading torch (181.0 MB)",
        "unpacking 3 packages",
        "compiling what every command imports",
        "done",
    ]


def test_what_pip_complains_of_is_seen(tmp_path: Path) -> None:
    done = set_up(tmp_path, "broken")
    assert done.returncode == 1
    assert done.stderr.startswith("no such package\nsetup: pip could not install")


def test_older_clients_are_put_aside_and_one_that_cannot_be_had_is_no_failure(tmp_path: Path) -> None:
    done = set_up(tmp_path, "service")
    assert done.returncode == 0, done.stderr
    assert "far==2.0 could not be installed, and its tests will be skipped: no way to fetch it" in done.stdout
    assert [path.name for path in (tmp_path / ".venv" / "clients").iterdir()] == ["old-1.0"]
    again = set_up(tmp_path, "service")
    assert "old==1.0" not in again.stdout and "far==2.0" in again.stdout
    assert "into .venv" not in again.stdout
