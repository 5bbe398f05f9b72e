"""LeRobotWriter: what is recorded comes back, and survives interruption at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.data.lerobot import LeRobotDataset, LeRobotWriter
from etude.data.lerobot import commit as commit_module
from etude.errors import DataError
from etude.types import Feature
from tests.unit.data.lerobot.recordings import (
    CAMERAS,
    FEATURES,
    TASKS,
    add_episode,
    everything,
    make_frame,
    picture,
    record,
    same_recording,
)

ALL = {**FEATURES, **CAMERAS}


def test_what_is_recorded_comes_back(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d", cameras=True))
    batch = everything(dataset)
    assert (len(dataset), dataset.num_episodes, dataset.fps, dataset.tasks) == (18, 3, 10.0, list(TASKS))
    assert batch["episode_index"].tolist() == [0] * 6 + [1] * 5 + [2] * 7
    assert batch["frame_index"].tolist() == [*range(6), *range(5), *range(7)]
    assert batch["task_index"].tolist() == [0] * 6 + [1] * 5 + [0] * 7
    assert batch["timestamp"].tolist() == pytest.approx([f / 10 for n in (6, 5, 7) for f in range(n)])
    assert batch["index"].tolist() == list(range(18))
    for row, (episode, frame) in enumerate(zip(batch["episode_index"].tolist(), batch["frame_index"].tolist())):
        expected = make_frame(episode, frame, ALL)
        assert batch["observation.state"][row].tolist() == expected["observation.state"].tolist()
        wrist = batch["observation.images.wrist"][row].permute(1, 2, 0)
        assert torch.equal(wrist, torch.from_numpy(expected["observation.images.wrist"]))
        top = batch["observation.images.top"][row].permute(1, 2, 0).numpy().astype(int)
        assert np.abs(top - expected["observation.images.top"]).mean() < 6


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_videos_of_both_codecs_keep_every_frame_apart(tmp_path: Path, codec: Any) -> None:
    features = {"observation.images.top": {"dtype": "video", "shape": (64, 64, 3)}}
    with LeRobotWriter(tmp_path / "d", features, 10, codec=codec) as writer:
        for number in range(2):
            add_episode(writer, number, 7, features)
    batch = everything(LeRobotDataset(tmp_path / "d"))
    for row, picture_ in enumerate(batch["observation.images.top"].permute(0, 2, 3, 1).numpy().astype(int)):
        distances = [
            np.abs(picture_ - picture(episode, frame, (64, 64, 3))).mean() for episode in range(2) for frame in range(7)
        ]
        assert int(np.argmin(distances)) == row


def test_the_layout_is_that_of_version_3(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/etude.json",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "videos/observation.images.top/chunk-000/file-000.mp4",
    }
    info = json.loads((root / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 18, 2)
    assert info["splits"] == {"train": "0:3"}
    assert info["features"]["observation.images.top"]["info"]["video.codec"] == "h264"
    assert info["features"]["timestamp"] == {"dtype": "float32", "shape": [1], "names": None}
    stats = json.loads((root / "meta/stats.json").read_text())
    assert np.shape(stats["observation.images.top"]["mean"]) == (3, 1, 1)
    assert stats["action"]["count"] == [18]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"action": np.zeros(3, np.float32)}, r"episode 0, frame 1: feature 'action' has shape \[3\], expected \[2\]"),
        ({"action": np.array([0, np.nan], np.float32)}, "frame 1: feature 'action' is NaN or infinite"),
        ({"action": None}, "feature 'action' must be float32"),
        ({"observation.images.top": np.zeros((32, 48, 3), np.float32)}, "must be uint8 pixels, got float32"),
        ({"extra": 1}, "'extra' is not among the features"),
    ],
)
def test_a_wrong_frame_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with LeRobotWriter(tmp_path / "d", ALL, 10) as writer:
        writer.add_frame(make_frame(0, 0, ALL))
        with pytest.raises(DataError, match=message):
            writer.add_frame({**make_frame(0, 1, ALL), **change})
        assert writer.episode_length == 1


def test_a_folder_that_holds_something_else_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(DataError, match="run: holds 'checkpoints' and is no dataset"):
        LeRobotWriter(tmp_path / "run", {"action": {"dtype": "float32", "shape": (2,)}}, 10)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_a_missing_feature_and_an_empty_episode_are_refused(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "d", FEATURES, 10)
    with pytest.raises(DataError, match="has no frames"):
        writer.save_episode("push")
    with pytest.raises(DataError, match="feature 'action' is missing"):
        writer.add_frame({"observation.state": np.zeros(4, np.float32)})
    with pytest.raises(DataError, match="nothing was recorded"):
        writer.finalize()
    writer.close()


def test_odd_pictures_cannot_be_video(tmp_path: Path) -> None:
    features = {"observation.images.top": {"dtype": "video", "shape": (33, 48, 3)}}
    writer = LeRobotWriter(tmp_path / "d", features, 10)
    with pytest.raises(DataError, match="even height and width, got 33 x 48"):
        writer.add_frame(make_frame(0, 0, features))
    writer.close()


def test_only_one_writer_at_a_time(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "d", FEATURES, 10), pytest.raises(DataError, match="another writer"):
        LeRobotWriter(tmp_path / "d", FEATURES, 10)


def test_an_unfinished_recording_is_refused_by_the_reader(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "d", FEATURES, 10)
    add_episode(writer, 0, 3, FEATURES)
    writer.close()
    with pytest.raises(DataError, match="recording is not finished"):
        LeRobotDataset(tmp_path / "d")


def test_recording_goes_on_after_the_last_whole_episode(tmp_path: Path) -> None:
    root = tmp_path / "d"
    writer = LeRobotWriter(root, ALL, 10)
    add_episode(writer, 0, 6, ALL)
    writer.add_frame(make_frame(1, 0, ALL))
    writer.close()
    with LeRobotWriter(root, ALL, 10) as again:
        assert (again.num_episodes, again.num_frames, again.tasks) == (1, 6, [TASKS[0]])
        add_episode(again, 1, 5, ALL)
    with LeRobotWriter(root, ALL, 10) as third:
        assert third.num_episodes == 2
        add_episode(third, 2, 7, ALL)
    grown, whole = everything(LeRobotDataset(root)), everything(LeRobotDataset(record(tmp_path / "e", cameras=True)))
    assert same_recording(grown, whole)
    assert json.loads((root / "meta/stats.json").read_text())["action"]["count"] == [18]


def test_features_may_come_in_another_order_when_recording_goes_on(tmp_path: Path) -> None:
    features: dict[str, dict[str, Any]] = {
        "observation.images.left": {"dtype": "video", "shape": (32, 32, 3)},
        "observation.images.right": {"dtype": "video", "shape": (32, 32, 3)},
        "action": {"dtype": "float32", "shape": (2,)},
    }
    turned = dict(reversed(features.items()))
    frame = {
        "observation.images.left": np.zeros((32, 32, 3), np.uint8),
        "observation.images.right": np.full((32, 32, 3), 250, np.uint8),
        "action": np.ones(2, np.float32),
    }
    for number, order in enumerate((features, turned, features, turned)):
        writer = LeRobotWriter(tmp_path / "d", order, 10)
        writer.add_frame(frame)
        writer.save_episode("x")
        if number % 2:
            writer.finalize()
        else:
            writer.close()
    batch = everything(LeRobotDataset(tmp_path / "d"))
    assert len(batch["action"]) == 4
    assert batch["observation.images.left"].max() < 10 and batch["observation.images.right"].min() > 240


def test_other_features_or_rates_cannot_be_added(tmp_path: Path) -> None:
    root = record(tmp_path / "d")
    with pytest.raises(DataError, match="other features"):
        LeRobotWriter(root, ALL, 10)
    with pytest.raises(DataError, match="10 frames a second, not 20"):
        LeRobotWriter(root, FEATURES, 20)


def test_features_of_a_spec_are_understood(tmp_path: Path) -> None:
    spec = {
        "observation.state": Feature((4,), role="state", names=("a", "b", "c", "d")),
        "observation.images.top": Feature((3, 16, 32), "uint8", "image"),
        "action": Feature((), "int64", "action", classes=3),
        "task_index": Feature((), "int64", "task"),
    }
    with LeRobotWriter(tmp_path / "d", spec, 10, images="image") as writer:
        frame = {
            "observation.state": np.zeros(4),
            "observation.images.top": np.ones((3, 16, 32), np.uint8),
            "action": 2,
        }
        writer.add_frame(frame)
        writer.save_episode("go")
    dataset = LeRobotDataset(tmp_path / "d")
    assert dataset.spec["observation.images.top"].shape == (3, 16, 32)
    assert dataset.spec["observation.state"].names == ("a", "b", "c", "d")
    assert dataset[0]["action"].tolist() == [2]


class _Crash(BaseException):
    pass


@pytest.mark.parametrize("moment", range(9))
def test_a_crash_at_any_step_of_finishing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    root = record(tmp_path / "d", (6,), cameras=True)
    writer = LeRobotWriter(root, ALL, 10)
    add_episode(writer, 1, 5, ALL)
    count = 0

    def replace(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count > moment:
            raise _Crash
        os.rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        try:
            writer.finalize()
        except _Crash:
            writer.close()
    with LeRobotWriter(root, ALL, 10) as again:
        assert (again.num_episodes, again.num_frames) == (2, 11)
        add_episode(again, 2, 7, ALL)
    grown, whole = everything(LeRobotDataset(root)), everything(LeRobotDataset(record(tmp_path / "e", cameras=True)))
    assert same_recording(grown, whole)
    assert not (root / ".recording").exists()


@pytest.mark.slow
def test_a_killed_recording_keeps_its_whole_episodes(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from etude.data.lerobot import LeRobotWriter\n"
        "from tests.unit.data.lerobot.recordings import *\n"
        f"writer = LeRobotWriter(Path({str(tmp_path / 'd')!r}), {{**FEATURES, **CAMERAS}}, 10)\n"
        "for number in range(1000):\n"
        "    add_episode(writer, number, 5, {**FEATURES, **CAMERAS}); print(number, flush=True)\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(3)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
    saved = sum(line.endswith("\n") for line in said)
    writer = LeRobotWriter(tmp_path / "d", ALL, 10)
    assert writer.num_episodes in (saved, saved + 1)
    writer.finalize()
    batch = everything(LeRobotDataset(tmp_path / "d"))
    assert batch["episode_index"].tolist() == [number for number in range(len(batch["index"]) // 5) for _ in range(5)]


def test_data_files_are_cut_to_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_module.layout, "DATA_FILES_SIZE_IN_MB", 0)
    monkeypatch.setattr(commit_module.layout, "VIDEO_FILES_SIZE_IN_MB", 0)
    monkeypatch.setattr(commit_module.layout, "CHUNKS_SIZE", 2)
    root = record(tmp_path / "d", cameras=True)
    assert sorted(path.name for path in root.glob("data/*/*")) == [
        "file-000.parquet",
        "file-000.parquet",
        "file-001.parquet",
    ]
    assert len(list(root.glob("videos/*/*/*.mp4"))) == 3
    whole = everything(LeRobotDataset(record(tmp_path / "e", cameras=True)))
    cut = everything(LeRobotDataset(root))
    assert same_recording(cut, whole)
