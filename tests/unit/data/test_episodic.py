"""Episodes in HDF5 files: windows, padding, statistics, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.data.episodic import EpisodicDatasetFactory, Pictures
from etude.data.fingerprint import fingerprint
from etude.data.map import MapData
from etude.data.statistics import NormStats
from etude.errors import DataError
from etude.types.protocols import Place

h5py = pytest.importorskip("h5py")
CAMERA = "observation.images.head"
DESCRIPTION = {
    "observations": {
        "observation.state": ["observations/qpos", {"key": "observations/qvel", "start": 1, "stop": 3}],
        CAMERA: "observations/images/head",
    },
    "actions": "action",
}


def write(path: Path, episode: int, length: int, **changed: Any) -> None:
    time = np.arange(length)
    arrays = {
        "observations/qpos": np.stack([100 * episode + time, np.full(length, 7)], 1).astype(np.float32),
        "observations/qvel": np.stack([time, time + 0.5, -time], 1).astype(np.float64),
        "observations/images/head": np.tile((10 * episode + time).astype(np.uint8)[:, None, None, None], (1, 8, 9, 3)),
        "action": (1000.0 * episode + time).astype(np.float32)[:, None],
    }
    with h5py.File(path, "w") as file:
        for name, array in {**arrays, **changed}.items():
            if array is not None:
                file[name] = array


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders with eleven episodes in all, of 4, 5, 6 and 7 frames in turn."""
    for name, numbers in (("first", range(10)), ("second", range(10, 11))):
        (tmp_path / name).mkdir()
        for number in numbers:
            write(tmp_path / name / f"episode_{number}.hdf5", number, 4 + number % 4)
    return tmp_path


def build(folder: Path, **params: Any) -> dict[str, Any]:
    both = [str(folder / "first"), str(folder / "second")]
    given = {"dataset_dir_l": both, "task_config": DESCRIPTION, "task_name": "pour", **params}
    return EpisodicDatasetFactory().build({"local_rank": 0, "dist_enabled": False, "save_dir": "x"}, given)


def rows(*numbers: int) -> tuple[Any, Any]:
    return np.array(numbers), np.zeros(len(numbers), dtype=np.uint64)


def test_windows_lie_within_the_episode_and_padding_is_marked(folder: Path) -> None:
    dataset = build(folder, chunk_size=3, robot_obs_size=2, img_obs_size=2)["dataset"]
    assert len(dataset) == 4 + 5 + 6 + 7 + 4 + 5 + 6 + 7 + 4 + 5 + 6
    batch = dataset.gather(*rows(0, 2, 4))  # the first episode has frames 0 to 3
    assert batch["action"][:, :, 0].tolist() == [[0, 1, 2], [2, 3, 3], [1000, 1001, 1002]]
    assert batch["action_is_pad"].tolist() == [[False] * 3, [False, False, True], [False] * 3]
    assert batch["observation.state"][1].tolist() == [[1, 7, 1.5, -1], [2, 7, 2.5, -2]]  # the oldest first
    assert batch["observation.state_is_pad"].tolist() == [[True, False], [False, False], [True, False]]
    assert batch[CAMERA].shape == (3, 2, 3, 8, 9)
    assert batch[CAMERA][:, :, 0, 0, 0].tolist() == [[0, 0], [1, 2], [10, 10]]
    assert {name: value.shape for name, value in dataset[0].items()} == {n: v[0].shape for n, v in batch.items()}
    single = build(folder)["dataset"].gather(*rows(5))
    assert {name: tuple(value.shape) for name, value in single.items()} == {
        "observation.state": (1, 4), CAMERA: (1, 3, 8, 9), "action": (1, 1, 1), "action_is_pad": (1, 1),
    }  # fmt: skip


def test_only_the_frames_that_are_asked_for_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = build(folder, img_obs_size=2)["dataset"]
    read = []
    original = Pictures._read

    def noted(self: Any, episode: int, frames: Any) -> Any:
        read.append((episode, frames.tolist()))
        return original(self, episode, frames)

    monkeypatch.setattr(Pictures, "_read", noted)
    dataset.gather(*rows(2, 3, 5))
    assert read == [(0, [1, 2, 3]), (1, [0, 1])]


def test_statistics_are_those_of_the_training_episodes_and_normalise_batches(folder: Path) -> None:
    everything = build(folder)
    actions = everything["dataset"].gather(*rows(*range(59)))["action"][:, 0]
    torch.testing.assert_close(everything["norm_stats"]["action"]["mean"], actions.mean(0), rtol=1e-5, atol=1e-3)
    normal = NormStats.from_any(everything["norm_stats"]).normalize(everything["dataset"].gather(*rows(*range(59))))
    assert normal["action"].mean().abs() < 1e-5
    assert normal["observation.state"][:, 1].abs().max() == 0  # a constant
    assert normal[CAMERA].is_floating_point()
    assert normal[CAMERA].mean().abs() < 1e-4
    assert normal[CAMERA].std() == pytest.approx(1, abs=1e-3)
    train, held_out = (build(folder, split=split, val_fraction=0.2) for split in ("train", "validation"))
    assert train["norm_stats"]["action"]["mean"] == held_out["norm_stats"]["action"]["mean"]
    assert train["norm_stats"]["action"]["mean"] != everything["norm_stats"]["action"]["mean"]


def test_the_split_is_by_whole_episodes_and_the_same_each_time(folder: Path) -> None:
    def files(**params: Any) -> list[str]:
        return [path.name for path in build(folder, **params)["dataset"].files]

    train, held_out = files(split="train", val_fraction=0.2), files(split="validation", val_fraction=0.2)
    assert (len(train), len(held_out)) == (9, 2)
    assert sorted(train + held_out) == sorted(files())
    assert held_out == files(split="validation", val_fraction=0.2)
    assert held_out != files(split="validation", val_fraction=0.2, split_seed=3)


def test_other_numbers_are_noticed(folder: Path) -> None:
    before, again = fingerprint(MapData(build(folder)["dataset"])), fingerprint(MapData(build(folder)["dataset"]))
    write(folder / "first" / "episode_4.hdf5", 4, 4, action=np.ones((4, 1), np.float32))
    assert before == again != fingerprint(MapData(build(folder)["dataset"]))


def test_files_are_taken_in_the_order_of_their_numbers_without_mirrored_ones(folder: Path) -> None:
    write(folder / "first" / "episode_3_mirror.hdf5", 3, 4)
    assert len(build(folder)["dataset"].files) == 12
    files = [path.stem for path in build(folder, skip_mirrored_data=True)["dataset"].files]
    assert files == [f"episode_{number}" for number in range(11)]


def test_workers_read_the_same(folder: Path) -> None:
    def batches(workers: int) -> list[Any]:
        data = MapData(build(folder, img_obs_size=2, chunk_size=2)["dataset"])
        data.open(Place(0, 0, 1, 8, 1, workers, True))
        try:
            return [data.take(step)[0] for step in range(3)]
        finally:
            data.close()

    for here, there in zip(batches(0), batches(2), strict=True):
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_description_may_be_a_file_or_be_left_out(folder: Path) -> None:
    (folder / "task.json").write_text(json.dumps(DESCRIPTION))
    described = build(folder, task_config=None, task_config_path=str(folder / "task.json"))["dataset"]
    assert described.spec["observation.state"].shape == (4,)
    assert described.spec[CAMERA].role == "image"
    assert build(folder, task_config=None)["dataset"].spec["observation.state"].shape == (2,)


def test_pictures_compressed_one_by_one_are_read(folder: Path) -> None:
    from io import BytesIO

    from PIL import Image

    def png(level: int) -> bytes:
        content = BytesIO()
        Image.fromarray(np.full((8, 9, 3), level, np.uint8)).save(content, "PNG")
        return content.getvalue()

    packed = np.zeros((4, 400), np.uint8)
    for number in range(4):
        packed[number, : len(png(number))] = np.frombuffer(png(number), np.uint8)
    (folder / "packed").mkdir()
    write(folder / "packed" / "episode_0.hdf5", 0, 4, **{"observations/images/head": packed})
    dataset = build(folder, dataset_dir_l=str(folder / "packed"))["dataset"]
    assert dataset.gather(*rows(3, 1))[CAMERA][:, 0, 0, 0].tolist() == [3, 1]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"action": None}, "has no array 'action', which action is to be made of"),
        ({"action": np.zeros((3, 1), np.float32)}, "its arrays are not equally long"),
        ({"action": np.full((4, 1), np.nan, np.float32)}, "action is not finite in frame 0"),
        ({"action": np.zeros((4, 2), np.float32)}, "episodes of a dataset are alike"),
        ({"observations/images/head": np.zeros((4, 8, 9, 3), np.float32)}, "pictures are uint8"),
    ],
)
def test_what_is_wrong_with_an_episode_names_its_file(folder: Path, changed: dict[str, Any], said: str) -> None:
    write(folder / "first" / "episode_6.hdf5", 6, 4, **changed)
    with pytest.raises(DataError, match=said) as caught:
        build(folder)
    assert "episode_6.hdf5: " in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no HDF5 at all", None])
def test_a_corrupt_file_is_an_error_that_names_it(folder: Path, content: bytes | None) -> None:
    path = folder / "first" / "episode_4.hdf5"
    path.write_bytes(path.read_bytes()[:3000] if content is None else content)
    with pytest.raises(DataError, match=r"episode_4.hdf5: cannot be read as an HDF5 episode"):
        build(folder)


@pytest.mark.parametrize(
    "params, said",
    [
        ({"dataset_dir_l": []}, "needs dataset_dir_l"),
        ({"dataset_dir_l": ["nowhere"]}, "nowhere: there are no .hdf5 files"),
        ({"task_config": {"observations": {}}}, "task_config: must be"),
        ({"task_config": {"observations": {"qpos": "x"}, "actions": "a"}}, "call it 'observation.qpos'"),
        ({"task_config": {"observations": {"observation.a": {"kye": "x"}}, "actions": "a"}}, "an array is its key"),
        ({"task_config_path": "gone.json"}, "give task_config or task_config_path, not both"),
        ({"task_config": None, "task_config_path": "gone.json"}, "gone.json: cannot be read as JSON"),
        ({"chunk_size": 0}, "each must be at least 1"),
    ],
)
def test_what_is_wrong_with_the_parameters_is_told(folder: Path, params: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        build(folder, **params)


def test_a_policy_that_asks_for_other_windows_is_refused(folder: Path) -> None:
    dataset = build(folder, chunk_size=3, robot_obs_size=2, img_obs_size=2)["dataset"]
    dataset.use_windows(observation=[-1, 0], action=[0, 1, 2])
    with pytest.raises(DataError, match="the policy plans 8 actions, and the data is told to hold 3"):
        dataset.use_windows(action=list(range(8)))
    with pytest.raises(DataError, match="the policy sees 3 frames of numbers, and the data is told to hold 2"):
        dataset.use_windows(observation=[-2, -1, 0], action=[0, 1, 2])
    with pytest.raises(DataError, match="the policy sees 1 frames of numbers, and the data is told to hold 2"):
        dataset.use_windows(action=[0, 1, 2])
    free = build(folder)["dataset"]
    free.use_windows(observation=[-1, 0], action=[0])
    assert free.gather(*rows(1))["observation.state"].shape == (1, 2, 4)


def test_numbers_may_be_scaled_to_their_range(folder: Path) -> None:
    built = build(folder, normalization="min_max")
    batch = NormStats.from_any(built["norm_stats"]).normalize(built["dataset"].gather(*rows(*range(50))))
    assert float(batch["action"].min()) == -1
    assert float(batch["action"].max()) <= 1
    assert set(built["norm_stats"][CAMERA]) >= {"mean", "std"}  # of pictures, not the range
    with pytest.raises(DataError, match="normalization 'log' is unknown; one of mean_std, min_max"):
        build(folder, normalization="log")
