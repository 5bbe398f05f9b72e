"""Shell completion, asked the way a shell asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = "import sys; sys.argv[0] = 'etude'; from etude.cli.main import main; main()"


def complete(words: str, cwd: Path) -> list[str]:
    position = str(len(words.split(" ")) - 1)
    environment = os.environ | {"_ETUDE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=100
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for moment, run in enumerate(("almond", "alpha", "beta")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "status.json").write_text("{}")
        os.utime(tmp_path / "runs" / run / "status.json", (moment, moment))
    (tmp_path / "runs" / "alien").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits.yaml").write_text("")
    (tmp_path / "configs" / "notes.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "words,offers",
    [
        ("etude re", ["resume", "report", "record", "redteam"]),
        ("etude report al", ["alpha", "almond"]),
        ("etude report runs/b", ["runs/beta"]),
        ("etude train conf", ["configs/"]),
        ("etude check configs/", ["configs/digits.yaml"]),
        ("etude check configs/digits.yaml training.warm", ["training.warmup_steps="]),
        ("etude train metaworld-a", ["metaworld-act"]),
        ("etude list opt", ["optimizers"]),
        ("etude list presets metaworld-a", ["metaworld-act"]),
        ("etude list policies m", ["mlp"]),
        ("etude report nowhere/x", []),
    ],
)
def test_tab_offers_what_fits(folder: Path, words: str, offers: list[str]) -> None:
    assert complete(words, folder) == offers


def test_completion_can_be_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, "--show-completion"]
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([*command, "bash"], capture_output=True, text=True, check=False, env=environment, timeout=100)
    assert "_ETUDE_COMPLETE=complete_bash" in done.stdout
