"""The image: its recipe is sound, what it is made from is enough, and where there is an engine it is built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_recipe_passes_hadolint(repository: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--no-color", str(repository / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_wheel_is_made_from_what_the_recipe_copies_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    recipe = (repository / "Dockerfile").read_text()
    sent = {line[1:] for line in (repository / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", recipe, re.MULTILINE) for name in line.split()]
    assert set(copied) == sent
    for name in sent:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repository / name, tmp_path / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("etude-*.whl"))) == 1


def test_system_packages_are_those_of_the_set_up(repository: Path) -> None:
    recipe, script = ((repository / name).read_text() for name in ("Dockerfile", "scripts/system-packages.sh"))
    (found,) = re.findall(r"--no-install-recommends (.+?) \\", recipe)
    assert found in script


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_image_runs_the_command(repository: Path) -> None:
    asked = shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60)
    if not asked or asked.returncode:
        pytest.skip("no Docker engine answers")
    subprocess.run(["docker", "build", "-t", "etude-test", str(repository)], check=True, timeout=3000)
    command = ["docker", "run", "--rm", "etude-test", "train", "digits", "training.training_steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "reached step 2" in done.stdout, done.stderr
