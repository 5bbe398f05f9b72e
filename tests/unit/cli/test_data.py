"""`etude data`: tables for people, JSON for programs, a page for eyes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
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
from tests.unit.data.lerobot.plain import smooth, write_plain
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
    assert page.count("data:image/jpeg;base64,") == page.count("data:image/png;base64,") == 5, "a video, and images"
    assert page.count("<svg") == 2 and "lift the block" in page
    assert "http://" not in page and "https://" not in page
    assert not list(tmp_path.glob("*.html"))
    assert said("view", "d", "--episode", "0", "-o", "page.html").strip() == "page.html"
    with pytest.raises(DataError, match="no episode 9; there are 0 to 2"):
        said("view", "d", "--episode", "9")


def test_view_writes_the_whole_dataset_as_one_page(tmp_path: Path) -> None:
    record(tmp_path / "d", cameras=True)
    assert said("view", "d").strip() == "views/d.html"
    page = (tmp_path / "views/d.html").read_text()
    assert page.count('type="application/json" id="part-') == 3
    assert "push the block" in page and "http://" not in page and "https://" not in page
    assert said("view", "d", "-o", "out/page.html").strip() == "out/page.html"


def test_view_says_what_a_file_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "d", cameras=True)
    monkeypatch.setattr("etude.data.lerobot.view_page.MOST_EPISODES", 2)
    lines = said("view", "d", "-o", "page.html").splitlines()
    assert lines[0] == "page.html" and lines[1].startswith("This file holds 2 of 3 episodes")


def test_view_refuses_what_cannot_be_together(tmp_path: Path) -> None:
    record(tmp_path / "d")
    for given, said_of_it in (
        (["--serve", "-o", "x.html"], "--serve and --output: give one of them"),
        (["--serve", "--rerun", "x.rrd"], "--serve and --rerun: give one of them"),
        (["--serve", "--episode", "1"], "leave out --episode"),
        (["--rerun", "x.rrd", "--open"], "leave it out with --rerun"),
    ):
        with pytest.raises(ConfigError, match=said_of_it):
            said("view", "d", *given)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no complete LeRobot dataset"):
        said("view", "empty")


@pytest.mark.slow
def test_view_serves_large_datasets_until_control_c(tmp_path: Path) -> None:
    write_plain(tmp_path / "d", smooth(450, 8))
    command = [sys.executable, "-m", "etude", "data", "view", "d", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith(
        "450 episodes are more than one file should hold, so the dataset is served"
    )
    (port,) = re.findall(r"showing d at http://127\.0\.0\.1:(\d+)/", child.stdout.readline())
    connection = HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("GET", "/episode/449")
    assert json.loads(connection.getresponse().read())["cameras"] == []
    connection.close()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "stopped\n", "")


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
