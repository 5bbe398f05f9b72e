"""`etude new trainer`: three files that work as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.config.load import load
from etude.errors import ConfigError
from etude.registry import TRAINER_REGISTRY

runner = CliRunner()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def make(name: str, directory: Path) -> Path:
    result = runner.invoke(app, ["new", "trainer", name, "--dir", str(directory)])
    if result.exception:
        raise result.exception
    return directory


def test_three_files_are_written_and_the_next_steps_told(tmp_path: Path) -> None:
    result = runner.invoke(app, ["new", "trainer", "soft-labels", "--dir", str(tmp_path / "deep")])
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == [
        "soft_labels.py", "soft_labels.yaml", "test_soft_labels.py",
    ]  # fmt: skip
    assert f"etude train {tmp_path}/deep/soft_labels.yaml" in result.stdout
    assert "class SoftLabelsTrainer(Trainer):" in (tmp_path / "deep" / "soft_labels.py").read_text()


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("precious")
    with pytest.raises(ConfigError, match=r"test_mine\.py: already there"):
        make("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "precious"


@pytest.mark.parametrize("name", ["1st", "a b", "../up", "class", "Upper", "", "torch", "json", "trainer", "x.y"])
def test_names_that_cannot_work_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        make(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_generated_code_keeps_the_rules_of_the_house(tmp_path: Path) -> None:
    make("tidy_example", tmp_path)
    files = [str(tmp_path / "tidy_example.py"), str(tmp_path / "test_tidy_example.py")]
    for command in (["check", "--select", "E,F,I,UP,B"], ["format", "--check", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", *files]
        assert subprocess.run(ruff, capture_output=True, text=True, check=False, timeout=100).returncode == 0


def test_the_generated_config_is_valid(tmp_path: Path) -> None:
    make("valid_example", tmp_path)
    try:
        loaded = load(tmp_path / "valid_example.yaml")
        assert loaded.config.trainer is not None
        assert loaded.config.trainer.params == {"smoothing": 0.1}
        with pytest.raises(ConfigError, match="did you mean 'smoothing'"):
            load(tmp_path / "valid_example.yaml", ["trainer.params.smoothin=0.2"])
    finally:
        TRAINER_REGISTRY._entries.pop("valid_example", None)


@pytest.mark.slow
def test_the_generated_test_passes(tmp_path: Path) -> None:
    make("living_example", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_living_example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
        env={**ENVIRONMENT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they take seconds to import
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
