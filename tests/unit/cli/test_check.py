"""`etude check`: what a config says, where it says it, at once and without torch."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.errors import ConfigError

runner = CliRunner()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
CONFIG = """\
policy:
  type: mlp
  params:
    hidden: [64]
data: digits
training:
  lr: 1e-3
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("x.yaml")
    path.write_text(CONFIG)
    return path


def test_every_value_is_shown_with_its_origin(config: Path) -> None:
    result = runner.invoke(app, ["check", "x.yaml", "training.batch_size=16"])
    assert result.exit_code == 0, result.exception
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in result.stdout.splitlines()}
    assert rows["training.lr"] == ["0.001", "x.yaml:7:3"]
    assert rows["training.batch_size"] == ["16", "override 'training.batch_size=16'"]
    assert rows["training.seed"] == ["0", "default"]
    assert rows["policy.params.dropout"][1] == "default"
    assert "\x1b" not in result.stdout


def test_the_parameters_of_a_component_stand_beside_it(config: Path) -> None:
    keys = [line.split()[0] for line in runner.invoke(app, ["check", "x.yaml"]).stdout.splitlines()[1:]]
    sections = [key.split(".")[0] for key in keys]
    assert sections == sorted(sections, key=sections.index)
    assert len(keys) == len(set(keys))


def test_json_is_for_programs(config: Path) -> None:
    result = runner.invoke(app, ["check", "x.yaml", "--json", "training.lr=2e-3"])
    found = json.loads(result.stdout)
    assert found["config"]["training"]["lr"] == 0.002
    assert found["values"]["training.lr"] == {"value": "0.002", "origin": "override 'training.lr=2e-3'"}


def test_a_mistake_names_file_line_and_remedy(config: Path) -> None:
    config.write_text(CONFIG + "  batch_sze: 3\n")
    error = runner.invoke(app, ["check", "x.yaml"]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("x.yaml:8:3: training.batch_sze: unknown key; did you mean 'batch_size'?")


def test_secrets_are_not_printed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-check-93f1"
    monkeypatch.setenv("CHECK_TEST_TOKEN", canary)
    config.write_text(CONFIG + "run:\n  name: ${env:CHECK_TEST_TOKEN}\n")
    for options in ([], ["--json"]):
        result = runner.invoke(app, ["check", "x.yaml", *options])
        assert result.exit_code == 0, result.exception
        assert canary not in result.output
        assert "${env:CHECK_TEST_TOKEN}" in result.output


def test_checking_and_listing_import_nothing_heavy(config: Path) -> None:
    code = (
        "import sys; sys.argv = ['etude', *sys.argv[1:]]\n"
        "from etude.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'sklearn', 'rich', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for arguments in (["check", "x.yaml"], ["list"], ["list", "policies", "mlp"], ["list", "optimizers"]):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=100)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_checking_takes_a_fraction_of_a_second_of_cpu(config: Path) -> None:
    command = [sys.executable, "-m", "etude", "check", "x.yaml"]
    subprocess.run(command, capture_output=True, check=True, env=ENVIRONMENT, timeout=100)
    taken = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True, env=ENVIRONMENT, timeout=100)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # 0.25 s on an idle core; twice that leaves room for shared ones, and still catches an import of torch (2 s).
    assert min(taken) < 0.5
