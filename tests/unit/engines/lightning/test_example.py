"""The example runs as it stands, and what it prints is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_example


@pytest.mark.slow
def test_the_example_runs(repository: Path, tmp_path: Path, child_env: dict[str, str]) -> None:
    example = repository / "examples" / "lightning_trainer.py"
    done = run_example(example, [str(tmp_path / "out")], cwd=tmp_path, env=child_env)
    assert done.returncode == 0, done.stderr
    assert "resumed from step 15, bit for bit: True" in done.stdout
    assert "torch and lightning end with the same loss: True" in done.stdout
    assert (tmp_path / "out" / "reaching" / "version_0" / "hparams.yaml").is_file()
