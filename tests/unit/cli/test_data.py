"""`etude data`: tables for people, JSON for programs, a page for eyes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("pyarrow")

from etude.cli.datasets import parse_episodes
from etude.cli.main import app
from etude.data import LeRobotDataset
from etude.data.lerobot import LeRobotWriter
from etude.errors import ConfigError, DataError
from tests.unit.data.lerobot.recordings import FEATURES, make_frame, record
from tests.unit.data.test_convert import write_zarr

run = CliRunner()


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def said(*arguments: str) -> str:
    result = run.invoke(app, ["data", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_inspect_prints_features_and_tasks(tmp_path: Path) -> None:
    record(tmp_path / "d", cameras=True)
    text = said("inspect", "d")
    assert "3 episodes of 5 to 7 frames, 18 frames" in text
    assert re.search(r"observation\.images\.top +video +32 x 48 x 3 +image", text)
    assert re.search(r"0 +push the block +2", text)
    facts = json.loads(said("inspect", "d", "--json"))
    assert (facts["episodes"], facts["frames"], facts["fps"]) == (3, 18, 10)
    assert facts["tasks"][1] == {"index": 1, "task": "lift the block", "episodes": 1}


def test_names_in_a_dataset_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    features = {"observation.\x1b[31mred": {"dtype": "float32", "shape": (2,)}, **FEATURES}
    writer = LeRobotWriter(tmp_path / "d", features, 10)
    for frame in range(3):
        writer.add_frame(make_frame(0, frame, features))
    writer.save_episode("clear\x1b[2J the\x07 table")
    writer.finalize()
    for command in (["inspect", "d"], ["stats", "d"], ["inspect", "d", "--json"]):
        text = said(*command)
        assert "\x1b" not in text
        assert "\x07" not in text
    assert r"clear\x1b[2J the\x07 table" in said("inspect", "d")
    assert r"observation.\x1b[31mred" in said("inspect", "d")


def test_inspect_finds_faults(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    (root / "videos/observation.images.top/chunk-000/file-000.mp4").unlink()
    with pytest.raises(DataError, match="no such file"):
        said("inspect", "d")
    with pytest.raises(DataError, match="'nowhere/x' is not on this machine"):
        said("inspect", "nowhere/x")


def test_stats_are_those_of_the_data(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    text = said("stats", "d")
    assert re.search(r"observation\.state +x +", text) and "over 18 frames of 3 episodes" in text
    stats = json.loads(said("stats", "d", "--episodes", "0,2", "--json"))
    assert np.allclose(stats["action"]["mean"], LeRobotDataset(root, [0, 2]).stats["action"]["mean"])


def test_view_writes_one_page_without_network(tmp_path: Path) -> None:
    record(tmp_path / "d", cameras=True)
    assert said("view", "d", "--episode", "1").strip() == "views/d-episode-1.html"
    page = (tmp_path / "views/d-episode-1.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 10
    assert page.count("<svg") == 2 and "lift the block" in page
    assert "http://" not in page and "https://" not in page
    assert not list(tmp_path.glob("*.html"))
    assert said("view", "d", "-o", "page.html").strip() == "page.html"
    with pytest.raises(DataError, match="no episode 9; there are 0 to 2"):
        said("view", "d", "--episode", "9")


def test_convert_makes_a_dataset(tmp_path: Path) -> None:
    write_zarr(tmp_path / "pusht.zarr")
    text = said("convert", "pusht.zarr", "d", "--fps", "10", "--task", "push the T", "--images", "image")
    assert text.strip() == "d: 2 episodes, 12 frames of zarr at 10 a second, task 'push the T'"
    assert LeRobotDataset("d").tasks == ["push the T"]
    with pytest.raises(ConfigError, match="--fps must be positive"):
        said("convert", "pusht.zarr", "e", "--fps", "-1")


def test_episodes_are_read_as_ranges() -> None:
    assert parse_episodes(None) is None
    assert parse_episodes("0-2, 5") == [0, 1, 2, 5]
    for text in ("", "a", "1-", "-1", "1-b"):
        with pytest.raises(ConfigError, match="must look like"):
            parse_episodes(text)
