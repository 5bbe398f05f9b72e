"""convert: ALOHA, robomimic and diffusion-policy recordings become LeRobot datasets, value for value."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("h5py")
pytest.importorskip("zarr")

import h5py
import zarr
from PIL import Image

from etude.data import LeRobotDataset
from etude.data.convert import convert
from etude.errors import DataError
from tests.unit.data.lerobot.recordings import everything, picture

LENGTHS = (5, 7)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))


def pictures(episode: int, length: int, size: int = 32) -> Any:
    return np.stack([picture(episode, frame, (size, size, 3)) for frame in range(length)])


def numbers(episode: int, length: int, width: int) -> Any:
    return (1000 * episode + 10 * np.arange(length)[:, None] + np.arange(width)).astype(np.float64)


def write_aloha(folder: Path, compressed: bool = False) -> Path:
    folder.mkdir()
    for number, length in enumerate(LENGTHS):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file["action"] = numbers(number, length, 14) + 1
            file["observations/qpos"] = numbers(number, length, 14)
            file["observations/qvel"] = numbers(number, length, 14)
            shown = pictures(number, length)
            if compressed:
                rows = [_jpeg(frame[..., ::-1]) for frame in shown]
                widest = max(map(len, rows))
                shown = np.stack([np.frombuffer(row.ljust(widest, b"\0"), np.uint8) for row in rows])
            file["observations/images/top"] = shown
    return folder


def _jpeg(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def write_robomimic(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "env_kwargs": {"control_freq": 25}})
        for name, number in (("demo_10", 1), ("demo_2", 0)):  # numbers, not letters, decide the order
            length = LENGTHS[number]
            data[f"{name}/actions"] = numbers(number, length, 7)
            data[f"{name}/rewards"] = np.arange(length)
            data[f"{name}/obs/robot0_eef_pos"] = numbers(number, length, 3)
            data[f"{name}/obs/robot0_gripper_qpos"] = numbers(number, length, 2) + 5
            data[f"{name}/obs/object"] = numbers(number, length, 10)
            data[f"{name}/obs/agentview_image"] = pictures(number, length)
    return path


def write_zarr(path: Path, version: int = 2) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    states = np.concatenate([numbers(number, length, 5) for number, length in enumerate(LENGTHS)]).astype(np.float32)
    shown = np.concatenate([pictures(number, length) for number, length in enumerate(LENGTHS)]).astype(np.float32)
    for name, values in (("state", states), ("action", states[:, :2]), ("img", shown)):
        group.create_array(f"data/{name}", data=values)
    group.create_array("data/keypoint", data=states[:, :4].reshape(-1, 2, 2))
    group.create_array("meta/episode_ends", data=np.cumsum(LENGTHS))
    return path


def assert_pictures(batch: dict[str, torch.Tensor], name: str) -> None:
    found = batch[name].permute(0, 2, 3, 1).numpy().astype(int)
    expected = np.concatenate([pictures(number, length) for number, length in enumerate(LENGTHS)])
    assert np.abs(found - expected).mean() < 8


@pytest.mark.parametrize("compressed", [False, True])
def test_aloha_episodes_are_converted(tmp_path: Path, compressed: bool) -> None:
    source = write_aloha(tmp_path / "sim_cube", compressed)
    made = convert(source, tmp_path / "d")
    assert (made.format, made.episodes, made.frames, made.fps) == ("aloha", 2, 12, 50.0)
    dataset = LeRobotDataset(tmp_path / "d")
    batch = everything(dataset)
    expected = np.concatenate([numbers(number, length, 14) for number, length in enumerate(LENGTHS)])
    assert np.array_equal(batch["observation.state"], expected) and np.array_equal(batch["action"], expected + 1)
    assert dataset.tasks == ["sim cube"] and batch["episode_index"].tolist() == [0] * 5 + [1] * 7
    assert_pictures(batch, "observation.images.top")


def test_robomimic_demonstrations_are_converted(tmp_path: Path) -> None:
    made = convert(write_robomimic(tmp_path / "demo.hdf5"), tmp_path / "d", task="lift the cube", images="image")
    assert (made.format, made.episodes, made.fps) == ("robomimic", 2, 25.0)
    dataset = LeRobotDataset(tmp_path / "d")
    batch = everything(dataset)
    assert batch["observation.state"].shape == (12, 5) and batch["observation.environment_state"].shape == (12, 10)
    assert batch["observation.state"][5].tolist() == [1000, 1001, 1002, 1005, 1006]
    assert dataset.spec["observation.state"].names == (
        "robot0_eef_pos.0", "robot0_eef_pos.1", "robot0_eef_pos.2", "robot0_gripper_qpos.0", "robot0_gripper_qpos.1",
    )  # fmt: skip
    assert batch["next.reward"][:5, 0].tolist() == [0, 1, 2, 3, 4]
    assert dataset.tasks == ["lift the cube"]
    assert_pictures(batch, "observation.images.agentview")


def test_features_can_be_renamed_as_an_environment_calls_them(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "pusht.zarr")
    convert(source, tmp_path / "d", rename={"observation.images.image": "observation.images.pixels"})
    dataset = LeRobotDataset(tmp_path / "d", exclude=["observation.state", "observation.environment_state"])
    assert set(dataset.spec.features) == {"observation.images.pixels", "action", "task_index"}
    assert_pictures(everything(dataset), "observation.images.pixels")
    with pytest.raises(DataError, match=r"no feature 'observation.stat' to rename; did you mean 'observation.state'"):
        convert(source, tmp_path / "e", rename={"observation.stat": "x"})
    with pytest.raises(DataError, match="two features would be called 'action'"):
        convert(source, tmp_path / "e", rename={"observation.state": "action"})


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_of_diffusion_policy_is_converted(tmp_path: Path, version: int) -> None:
    made = convert(write_zarr(tmp_path / "pusht_replay.zarr", version), tmp_path / "d", fps=12)
    assert (made.format, made.episodes, made.frames, made.fps, made.task) == ("zarr", 2, 12, 12, "pusht replay")
    batch = everything(LeRobotDataset(tmp_path / "d"))
    assert batch["observation.state"][5].tolist() == [1000, 1001, 1002, 1003, 1004]
    assert batch["observation.environment_state"][5].tolist() == [1000, 1001, 1002, 1003]
    assert batch["action"][5].tolist() == [1000, 1001]
    assert_pictures(batch, "observation.images.image")


def test_an_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    source = write_zarr(tmp_path / "a.zarr")

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "d", on_episode=stop)
    seen: list[int] = []
    convert(source, tmp_path / "d", on_episode=lambda done, total: seen.append(done))
    assert seen == [2] and len(LeRobotDataset(tmp_path / "d")) == 12


def test_odd_pictures_become_images(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "odd.zarr", mode="w", zarr_format=2)
    group.create_array("data/action", data=np.zeros((3, 2), np.float32))
    group.create_array("data/img", data=np.full((3, 33, 32, 3), 0.5, np.float32))
    group.create_array("meta/episode_ends", data=np.array([3]))
    convert(tmp_path / "odd.zarr", tmp_path / "d")
    assert (everything(LeRobotDataset(tmp_path / "d"))["observation.images.image"] == 128).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "no such file or directory"),
        (lambda path: path.mkdir(), "neither HDF5 .* nor Zarr"),
        (lambda path: path.write_text("x"), "neither HDF5 .* nor Zarr"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "x", tmp_path / "d")


def test_damaged_recordings_are_told_in_one_sentence(tmp_path: Path) -> None:
    folder = write_aloha(tmp_path / "a")
    file = folder / "episode_1.hdf5"
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(DataError, match=r"episode_1\.hdf5: cannot be read as an ALOHA episode"):
        convert(folder, tmp_path / "d")
    (tmp_path / "b.hdf5").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        convert(tmp_path / "b.hdf5", tmp_path / "e")
    store = write_zarr(tmp_path / "c.zarr")
    group = zarr.open_group(store, mode="a")
    del group["meta/episode_ends"]
    group.create_array("meta/episode_ends", data=np.array([5, 9]))
    with pytest.raises(DataError, match="episodes end at frame 9, but the arrays are of other lengths"):
        convert(store, tmp_path / "f")
    with pytest.raises(DataError, match="format 'rosbag' is unknown"):
        convert(store, tmp_path / "g", format="rosbag")  # type: ignore[arg-type]
