"""`etude evaluate`: the numbers that Python gives, printed and kept."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from etude.cli.acting import load_function
from etude.cli.main import app
from etude.errors import ConfigError, EtudeError
from etude.policies.mlp import MLP
from etude.registry import load_plugins
from etude.simulation.evaluate import evaluate_policy
from tests.unit.simulation.conftest import OPTIONS, PENDULUM, build

pytest.importorskip("gymnasium")
SETTINGS = [text for key, value in OPTIONS.items() for text in ("--option", f"{key}={json.dumps(value)}")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    build(MLP(hidden=[8], chunk_size=4)).save_pretrained(tmp_path / "saved")
    return tmp_path


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_finds_what_python_finds(folder: Path) -> None:
    found = json.loads(invoke("saved", "--env", PENDULUM, "--episodes", "5", "--json", *SETTINGS).stdout)
    from etude.policies.base import PolicyModule

    alone = evaluate_policy(PolicyModule.from_pretrained(folder / "saved"), PENDULUM, episodes=5, options=OPTIONS)
    assert found["rows"] == json.loads(alone.to_json())["rows"]


def test_a_table_is_printed_and_files_are_left(folder: Path) -> None:
    asked = ["saved", "--env", PENDULUM, "--episodes", "3", "--slots", "2", "--workers", "2", *SETTINGS]
    said = invoke(*asked, "--option", "success_return=1e9").stdout
    assert said.splitlines()[0].split() == ["env", "succeeded", "rate", "95", "%", "interval", "steps", "reward"]
    assert "0/3" in said
    assert "policy " in said
    kept, stem = folder / "saved/evaluation", "gym-Pendulum-v1-test"
    names = [f"{stem}.csv", f"{stem}.diagnosis.safetensors", f"{stem}.json"]
    assert [path.name for path in sorted(kept.iterdir())] == names
    with (kept / "gym-Pendulum-v1-test.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3


def test_failures_are_told_by_what_went_wrong_unless_nobody_wants_to_know(folder: Path) -> None:
    asked = ["saved", "--env", PENDULUM, "--episodes", "3", *SETTINGS, "--option", "success_return=1e9"]
    said = invoke(*asked).stdout
    assert sum(int(line.split()[0]) for line in said.splitlines() if " failure" in line) == 3
    found = json.loads(invoke(*asked, "--json").stdout)
    assert sorted(number for group in found["failures"] for number in group["episodes"]) == [0, 1, 2]
    assert " failure" not in invoke(*asked, "--no-diagnose").stdout
    for wrong in (["--samples", "1"], ["--samples", "4", "--no-diagnose"]):
        with pytest.raises(ConfigError, match="samples"):
            invoke(*asked, *wrong)
    assert not list(folder.glob("saved/evaluation/*.safetensors")), "what belongs to other results goes"


def test_an_environment_without_a_notion_of_success_shows_its_reward(folder: Path) -> None:
    result = invoke("saved", "--env", PENDULUM, "--episodes", "3", *SETTINGS)
    head, row = (line.split() for line in result.stdout.splitlines()[:2])
    assert head == ["env", "episodes", "reward", "95", "%", "interval", "steps"]
    assert row[:2] == [PENDULUM, "3"] and float(row[2]) < 0 and row[4] == "to"
    assert (
        "%" not in result.output.replace("95 % interval", "").replace("99 %", "") and "succeeded" not in result.output
    )
    assert "mean reward -" in result.output


@pytest.mark.usefixtures("registries_restored")  # robots of later tests would load it in their own process
def test_a_file_may_be_the_plugin_and_the_policy(folder: Path) -> None:
    # Run twice, it would register its parts twice; here the second folder of that name would be refused.
    (folder / "both.py").write_text("import os\nos.mkdir('once')\ndef rest(observation):\n    return [0.0]\n")
    load_plugins(["both.py"])
    assert load_function(Path("both.py"), "rest")({}) == [0.0]


def test_a_function_is_evaluated_over_several_environments(folder: Path) -> None:
    (folder / "still.py").write_text("import numpy as np\ndef rest(observation):\n    return np.zeros(1)\n")
    arguments = ["--env", PENDULUM, "--env", "gym:MountainCarContinuous-v0", "--episodes", "2", "--split", "validation"]
    said = invoke("still.py:rest", *arguments, "-o", "out", *SETTINGS).stdout
    assert [line.split()[0] for line in said.splitlines()[1:4]] == [PENDULUM, "gym:MountainCarContinuous-v0", "all"]
    found = json.loads(Path("out/gym-Pendulum-v1+gym-MountainCarContinuous-v0-validation.json").read_text())
    alone = evaluate_policy(
        lambda _: np.zeros(1), [PENDULUM, "gym:MountainCarContinuous-v0"], episodes=2, split="validation",
        options=OPTIONS,
    )  # fmt: skip
    assert found["rows"] == json.loads(alone.to_json())["rows"]


@pytest.mark.slow
def test_films_are_made(folder: Path) -> None:
    arguments = ["--env", "gym:Pendulum-v1", "--episodes", "2", "--video", "1", "--option", "max_steps=5"]
    result = invoke("saved", *arguments)
    said = result.stdout
    assert result.output.index("95 % interval") < result.output.index("film 1/1") < result.output.index("video: ")
    (film,) = (folder / "saved/evaluation/videos").iterdir()
    assert f"video: saved/evaluation/videos/{film.name}" in said


def test_an_environment_of_a_plugin_is_found(folder: Path) -> None:
    (folder / "slow_pendulum.py").write_text(
        "from etude.registry import ENVIRONMENT_REGISTRY\n"
        "from etude.simulation.environments.gym import GymEnvironment\n"
        "@ENVIRONMENT_REGISTRY.register('evaluate_test_pendulum')\n"
        "class Mine(GymEnvironment):\n"
        "    def __init__(self, max_steps: int = 5) -> None:\n"
        "        super().__init__('Pendulum-v1', max_steps=max_steps, render=False)\n"
    )
    arguments = ["saved", "--env", "evaluate_test_pendulum", "--episodes", "2", "--json"]
    found = json.loads(invoke(*arguments, "--plugin", "slow_pendulum.py").stdout)
    assert [row["steps"] for row in found["rows"]] == [5, 5]


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        (["absent", "--env", PENDULUM], EtudeError, "no run 'absent'"),
        (["saved", "--env", "gym:Nope-v0"], ConfigError, "Nope"),
        (["saved", "--env", PENDULUM, "--split", "tset"], ConfigError, "train, validation, test"),
        (
            ["saved", "--env", "gym:CartPole-v1"],
            ConfigError,
            r"with observation.state \[3\].* has observation.state \[4\]",
        ),
        (["saved", "--env", PENDULUM, "--option", "speed=3"], ConfigError, "no option 'speed'"),
    ],
)
def test_mistakes_are_told_in_words(arguments: list[str], kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        invoke(*arguments)
