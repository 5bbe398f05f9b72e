"""`etude record`: from a command to a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from etude.cli.acting import load_function, read_options
from etude.cli.environments import find_environments, plain_name
from etude.cli.main import app
from etude.data.lerobot.reader import LeRobotDataset
from etude.errors import ConfigError, DataError

pytest.importorskip("gymnasium")
pytest.importorskip("pyarrow")
POLE = ["record", "--env", "gym:CartPole-v1", "--option", "success_return=12", "--option", "render=false"]
SCRIPT = """\
import numpy as np

def balance(observation):
    state = observation["observation.state"]
    return np.array(int(state[2] + 0.3 * state[3] > 0))

class Pusher:
    def __init__(self):
        self.pushed = 0
    def reset(self):
        self.pushed = 0
    def __call__(self, observation):
        self.pushed += 1
        return balance(observation)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("name", ["balance", "Pusher"])
def test_a_script_demonstrates(name: str) -> None:
    said = invoke(*POLE, "--policy", f"script.py:{name}", "--episodes", "3").stdout
    assert said.startswith("3 episodes, ")
    assert "dataset: data/gym-CartPole-v1" in said
    assert LeRobotDataset("data/gym-CartPole-v1", show_progress=False).num_episodes == 3
    again = invoke(*POLE, "--policy", f"script.py:{name}", "--episodes", "3").stdout
    assert "all of them there already" in again


@pytest.mark.slow
def test_the_expert_demonstrates_before_a_camera(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    invoke(
        "record", "--env", "metaworld/reach", "--episodes", "2", "--root", "d", "--cameras", "corner2,topview",
        "--size", "32", "--noise", "0.1", "--noise-share", "0.5", "--images", "image",
    )  # fmt: skip
    dataset = LeRobotDataset("d", show_progress=False, cache_dir=tmp_path / "cache")
    assert dataset.cameras == ["observation.images.corner2", "observation.images.topview"]
    assert dataset.spec["observation.images.corner2"].shape in ((3, 32, 32), (32, 32, 3))


def test_mistakes_are_told_in_words() -> None:
    with pytest.raises(ConfigError, match="without an expert"):
        invoke(*POLE)
    with pytest.raises(ConfigError, match="no such file"):
        invoke(*POLE, "--policy", "nowhere.py:f")
    with pytest.raises(ConfigError, match="has no function 'walk'"):
        invoke(*POLE, "--policy", "script.py:walk")
    with pytest.raises(ConfigError, match="no option 'cameras'"):
        invoke(*POLE, "--policy", "script.py:balance", "--cameras", "top")
    assert "Missing option '--env'" in invoke("record").output
    invoke(*POLE, "--policy", "script.py:balance", "--episodes", "1")
    with pytest.raises(DataError, match="recorded with seed=0, not 1"):
        invoke(*POLE, "--policy", "script.py:balance", "--seed", "1")


def test_a_script_that_fails_is_named(folder: Path) -> None:
    (folder / "bad.py").write_text("import nothing_like_this")
    with pytest.raises(ConfigError, match=r"bad.py cannot be loaded: ModuleNotFoundError"):
        load_function(folder / "bad.py", "f")


def test_options_are_yaml() -> None:
    found: dict[str, Any] = read_options(["a=1", "b=[x, y]", "c=true", "d=words here"], "left, right", 64)
    assert found == {"a": 1, "b": ["x", "y"], "c": True, "d": "words here", "cameras": ["left", "right"], "size": 64}
    for wrong in ("a", "=1", "a=[1"):
        with pytest.raises(ConfigError, match="--option"):
            read_options([wrong], None, None)


def test_recordings_are_named_after_their_environments() -> None:
    assert plain_name(["metaworld/reach", "gym:X-v0"]) == "metaworld-reach+gym-X-v0"


def test_many_environments_are_counted_in_a_file_name_and_not_named() -> None:
    every = find_environments(["metaworld/*"])
    assert len(every) == 50 and "metaworld/peg-insert-side" in every
    name = plain_name(every)
    assert name.startswith("metaworld-assembly+49-more-") and len(name) < 150
    assert plain_name(every[::-1]) != name and plain_name(["gym:" + "x" * 300])[:5] == "gym-x"
    assert len(plain_name(["gym:" + "x" * 300])) < 150


def test_patterns_name_environments() -> None:
    assert find_environments(["pusht", "metaworld/drawer-*"]) == [
        "pusht", "metaworld/drawer-close", "metaworld/drawer-open",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no task of Meta-World matches"):
        find_environments(["metaworld/xyz*"])
    with pytest.raises(ConfigError, match="names metaworld/drawer-open twice"):
        find_environments(["metaworld/drawer-open", "metaworld/drawer-*"])
