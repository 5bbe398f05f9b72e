"""`etude act`: the robot of the documentation, what is printed, exit codes, and the mistakes that are made first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from etude.cli.main import app
from etude.errors import ConfigError, ControlError, EtudeError, RegistryError, RobotError
from etude.policies.mlp import MLP
from etude.registry import ROBOT_REGISTRY
from tests.unit.deploy.serving import built, make_spec

PAGE = Path(__file__).resolve().parents[3] / "docs/howto/control-a-robot.md"
ARM = ("--robot", "my_arm.py:MyArm")
PATIENT = ["--watchdog-s", "60", "--max-misses", "1000", "--max-age-ms", "60000"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    spec = make_spec(state=2, action=2)
    built(MLP(hidden=[8], chunk_size=4), spec).save_pretrained(tmp_path / "saved")
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_arm.py").write_text(block, encoding="utf-8")
    (tmp_path / "unplugged.py").write_text(
        "class Arm:\n    def __init__(self):\n        raise OSError('no such port')\n"
    )
    return tmp_path


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["act", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_arm_of_the_documentation_runs(folder: Path) -> None:
    asked = ["saved", *ARM, "--robot-option", "port=/dev/null", "--steps", "6", "--rate", "50"]
    told = json.loads(invoke(*asked, *PATIENT, "--json").stdout)
    assert told["robot"] == "my arm"
    assert told["rate_hz"] == 50
    assert told["episodes"][0]["ended"] == "all steps taken"
    assert told["episodes"][0]["clamped"]["speed"] > 0
    assert told["stopped"] is None


def test_people_get_a_table(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    said = invoke("saved", *ARM, "--seconds", "0.4", "--episodes", "2", "--record", "trial", *PATIENT).stdout
    assert said.splitlines()[0].split() == [
        "episode", "steps", "Hz", "misses", "held", "clamped", "success", "ended"
    ]  # fmt: skip
    assert said.count("all steps taken") == 2
    assert re.search(r"inference: \d+ chunks, p50 [\d.]+ ms, p99 [\d.]+ ms; budget 100 ms a step", said)
    assert "recorded: trial, 2 episodes, " in said
    info = json.loads((folder / "trial/meta/info.json").read_text(encoding="utf-8"))
    assert info["fps"] == 10
    assert {"action", "control.planned", "control.missed", "control.clamped", "control.time_s"} <= set(info["features"])


def test_strict_limits_have_an_exit_code_and_still_a_summary() -> None:
    asked = ["saved", *ARM, "--steps", "6", *PATIENT, "--strict-limits", "--json"]
    result = CliRunner().invoke(app, ["act", *asked])
    assert isinstance(result.exception, ControlError)
    assert result.exception.exit_code == 14
    assert "--strict-limits stops there" in json.loads(result.stdout)["stopped"]


def test_a_robot_that_fails_has_an_exit_code(folder: Path) -> None:
    source = (
        (folder / "my_arm.py").read_text(encoding="utf-8").replace("return {", "raise OSError('no power'); return {")
    )
    (folder / "broken.py").write_text(source, encoding="utf-8")
    with pytest.raises(RobotError, match=r"my arm: observe\(\) failed: OSError: no power"):
        invoke("saved", "--robot", "broken.py:MyArm", "--steps", "3")


def test_a_file_that_registers_a_robot_is_enough(folder: Path) -> None:
    head = "from etude.registry import ROBOT_REGISTRY\n"
    source = (folder / "my_arm.py").read_text(encoding="utf-8")
    (folder / "plugin.py").write_text(
        head + source.replace("class MyArm", '@ROBOT_REGISTRY.register("plugged")\nclass MyArm'), encoding="utf-8"
    )
    entries = dict(ROBOT_REGISTRY._entries)
    try:
        told = json.loads(invoke("saved", "--robot", "plugin.py", "--steps", "2", *PATIENT, "--json").stdout)
        assert told["robot"] == "my arm"
    finally:
        ROBOT_REGISTRY._entries = entries


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ([*ARM], ConfigError, "does not say when an episode is done"),
        ([*ARM, "--steps", "1", "--seconds", "1"], ConfigError, "give one of them"),
        (
            [*ARM, "--robot-option", "prot=x"],
            ConfigError,
            "no option 'prot'.*'port'.*It has port",
        ),
        (
            [*ARM, "--robot-option", "port"],
            ConfigError,
            "--robot-option 'port': write KEY=VALUE",
        ),
        (["--robot", "my_arm.py:YourArm"], RegistryError, "defines MyArm, but no 'YourArm'"),
        (["--robot", "my_arm.py"], ConfigError, "registers no robot"),
        (["--robot", "simulatd"], RegistryError, "unknown robot 'simulatd'.*simulated"),
        ([], ConfigError, "the simulated robot needs an environment: --env"),
        ([*ARM, "--env", "pusht"], ConfigError, "--env is for the robot 'simulated'"),
        ([*ARM, "--steps", "1", "--limits", "none"], ConfigError, "--limits is robot or data"),
        ([*ARM, "--steps", "1", "--rate", "-3"], ConfigError, "the rate must lie above 0"),
        ([*ARM, "--steps", "1", "--rate", "0"], ConfigError, "the rate must lie above 0"),
        (["--robot", "unplugged.py:Arm"], RobotError, "robot Arm cannot be made: OSError: no such port"),
        (
            [*ARM, "--steps", "1", "--budget-ms", "500"],
            ConfigError,
            "within the 100 ms of a step",
        ),
        ([*ARM, "--steps", "1", "--hold", "on"], ConfigError, "hold is one of repeat, zero"),
        ([*ARM, "--steps", "1", "--max-speed", "0"], ConfigError, "max_speed must be above 0"),
        (
            [*ARM, "--steps", "1", "--lead", "9"],
            ConfigError,
            "--lead must be below the 4 actions",
        ),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], error: type[EtudeError], match: str) -> None:
    with pytest.raises(error, match=match):
        invoke("saved", *arguments)


def test_limits_of_the_data_are_those_of_its_actions() -> None:
    asked = ["saved", *ARM, "--steps", "2", "--limits", "data", *PATIENT, "--json"]
    assert json.loads(invoke(*asked).stdout)["episodes"][0]["clamped"]["position"] >= 0


@pytest.mark.nightly
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_command_and_its_robot(
    number: signal.Signals, code: int, folder: Path, child_env: dict[str, str]
) -> None:
    pytest.importorskip("gymnasium")
    from tests.unit.simulation.conftest import build

    build(MLP(hidden=[8], chunk_size=4)).save_pretrained(folder / "pendulum")
    command = [
        sys.executable, "-m", "etude", "act", "pendulum", "--env", "gym:Pendulum-v1", "--steps", "100000",
        "--robot-option", "env_options={render: false, max_steps: 100000}", "--record", "trial", *PATIENT,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=child_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "Hz" in process.stdout.readline(), "it runs"
    (robot,) = _children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    if number == signal.SIGTERM:
        assert "SIGTERM: simulated gym:Pendulum-v1 was stopped" in err
        assert "asked to stop" in out
        assert (folder / "trial/meta/info.json").is_file()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{robot}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{robot}")


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(one) for task in listed.parents[1].iterdir() for one in (task / "children").read_text().split()]
    return found
