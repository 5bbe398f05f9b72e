"""The wheel, away from the repository: everything that a command reads is inside."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def pip(*arguments: str, python: str = sys.executable, timeout_s: float = 200) -> None:
    command = [python, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(repository))
    (path,) = folder.glob("etude-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder into which nothing but the wheel is installed; as PYTHONPATH it comes before the editable install."""
    target = wheel.parent / "installed"
    pip("install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


def test_the_wheel_has_every_module_every_preset_and_its_types(wheel: Path, repository: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source, configs = repository / "src", repository / "configs"
    kinds = (".py", ".html", ".css", ".js", ".jsonl")
    modules = {str(path.relative_to(source)) for path in (source / "etude").rglob("*") if path.suffix in kinds}
    presets = {f"etude/configs/{path.relative_to(configs)}" for path in configs.rglob("*.yaml")}
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert inside == modules | presets | {"etude/py.typed"}


@pytest.fixture
def etude(installed: Path, child_env: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Run a command of the installed package in an empty folder, under the plainest locale."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    env = {**child_env, "PYTHONPATH": str(installed), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "etude", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False, timeout=250)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_presets_are_listed_checked_and_trained_by_name(
    etude: Callable[..., str], installed: Path, tmp_path: Path
) -> None:
    found = json.loads(etude("list", "presets", "--json"))
    assert all(Path(one["path"]).is_relative_to(installed) for one in found)
    values = json.loads(etude("check", "metaworld-act", "--json"))["values"].values()
    origins = {one["origin"].split(":")[0] for one in values}
    assert origins == {"default", str(installed / "etude/configs/robot/metaworld-act.yaml")}
    assert "reached step 2" in etude("train", "digits", "training.training_steps=2", "run.name=a")
    assert (tmp_path / "elsewhere/runs/a/status.json").is_file()
    assert etude("report", "a").strip() == "runs/a/report.html"


def test_a_skeleton_is_written_and_is_valid(etude: Callable[..., str]) -> None:
    etude("new", "trainer", "mine")
    etude("check", "mine.yaml")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_clean_environment_with_the_wheel_runs_the_quickstart(
    wheel: Path, repository: Path, child_env: dict[str, str], tmp_path: Path
) -> None:
    """As a user does it: an empty environment, pip at the versions of the lock, and the first command elsewhere."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True, timeout=300)
    clean, lock = tmp_path / "clean/bin", str(repository / "requirements.lock")
    pip("install", "-q", "-c", lock, f"{wheel}[quickstart,sim]", python=str(clean / "python"), timeout_s=1800)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    env = {name: value for name, value in child_env.items() if name != "PYTHONPATH"}
    command = [str(clean / "etude"), "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    run = folder / "runs/quickstart-pick-place-act"
    stages = json.loads((run / "quickstart.json").read_text())["stages"]
    assert all(stages[name]["done"] for name in ("record", "train", "evaluate"))
    assert "<video" in (run / "report.html").read_text(encoding="utf-8")
    where = [str(clean / "python"), "-c", "import etude; print(etude.__file__)"]
    assert subprocess.check_output(where, text=True, env=env, cwd=folder, timeout=60).startswith(
        str(tmp_path / "clean")
    )
