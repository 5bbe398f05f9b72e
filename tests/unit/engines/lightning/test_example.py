"""The example runs as it stands, and what it prints is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_example_runs(repository: Path, tmp_path: Path, child_env: dict[str, str]) -> None:
    command = [sys.executable, str(repository / "examples" / "lightning_trainer.py"), str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from step 15, bit for bit: True" in done.stdout
    assert "torch and lightning end with the same loss: True" in done.stdout
    assert (tmp_path / "out" / "reaching" / "version_0" / "hparams.yaml").is_file()
