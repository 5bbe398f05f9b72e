"""LeRobotDataset: windows, subsets, statistics, cameras and caches."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from etude.data import MapData
from etude.data.lerobot import LeRobotDataset
from etude.data.lerobot import source as source_module
from etude.errors import DataError
from etude.types.protocols import Place
from tests.unit.data.lerobot.recordings import NO_KEYS, everything, record
from tests.unit.data.sources import same, taken

FOREIGN = Path(__file__).parents[3] / "fixtures" / "lerobot_v3_foreign"


def test_windows_are_clamped_to_the_episode_and_padding_is_told(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d"))
    dataset.use_windows(observation=[-1, 0], action=[0, 1, 2])
    batch = dataset.gather(np.array([5, 6]), NO_KEYS[:2])
    assert batch["observation.state"].shape == (2, 2, 4)
    assert batch["action"][:, :, 0].tolist() == [[50, 50, 50], [1000, 1010, 1020]]
    assert batch["action_is_pad"].tolist() == [[False, True, True], [False, False, False]]
    assert batch["observation.state"][:, :, 0].tolist() == [[40, 50], [1000, 1000]]
    assert batch["observation.state_is_pad"].tolist() == [[False, False], [True, False]]
    dataset.use_windows(observation=None, action=[0])
    assert dataset.gather(np.array([5]), NO_KEYS[:1])["observation.state"].shape == (1, 4)


def test_windows_reach_cameras_too(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d", cameras=True))
    dataset.use_windows(observation=[-2, 0], action=[0])
    batch = dataset.gather(np.array([0, 3]), NO_KEYS[:2])
    assert batch["observation.images.top"].shape == (2, 2, 3, 32, 48)
    single = everything(LeRobotDataset(dataset.source))["observation.images.top"]
    assert torch.equal(batch["observation.images.top"][1], single[[1, 3]])
    assert batch["observation.images.wrist_is_pad"].tolist() == [[True, False], [False, False]]


def test_delta_timestamps_are_windows_in_seconds(tmp_path: Path) -> None:
    root = record(tmp_path / "d")
    dataset = LeRobotDataset(root, delta_timestamps={"action": [0.0, 0.1, 0.30001]})
    assert dataset.gather(np.array([0]), NO_KEYS[:1])["action"][0, :, 0].tolist() == [0, 10, 30]
    with pytest.raises(DataError, match=r"'action': 0\.15 s is not a multiple of 1/10 s"):
        LeRobotDataset(root, delta_timestamps={"action": [0.0, 0.15]})
    with pytest.raises(DataError, match="no columns"):
        LeRobotDataset(root, delta_timestamps={"actoin": [0.0]})


def test_samples_and_batches_agree(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d", cameras=True), [2, 0])
    dataset.use_windows(observation=[-1, 0], action=[0, 1])
    batch = everything(dataset)
    samples = [dataset[index] for index in range(len(dataset))]
    assert all(torch.equal(torch.stack([sample[name] for sample in samples]), batch[name]) for name in batch)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_subset_serves_only_its_episodes(tmp_path: Path) -> None:
    root = record(tmp_path / "d")
    dataset = LeRobotDataset(root, [2, 0])
    assert (len(dataset), dataset.num_episodes) == (13, 2)
    assert everything(dataset)["episode_index"].tolist() == [2] * 7 + [0] * 6
    for episodes, message in (([3], "no episode 3; there are 0 to 2"), ([], "no episodes"), ([1, 1], "twice")):
        with pytest.raises(DataError, match=message):
            LeRobotDataset(root, episodes)


def test_statistics_come_from_the_chosen_episodes_only(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d"), [0, 2])
    values = everything(dataset)["observation.state"].double().numpy()
    stats = dataset.spec["observation.state"].stats
    assert stats is not None
    assert np.allclose(stats["mean"], values.mean(0)) and np.allclose(stats["std"], values.std(0))
    assert np.allclose(stats["min"], values.min(0)) and np.allclose(stats["max"], values.max(0))
    assert np.allclose(stats["q01"], np.quantile(values, 0.01, axis=0)) and stats["count"].tolist() == [13]
    validation = LeRobotDataset(dataset.source, [1], stats_episodes=[0, 2])
    assert torch.equal(validation.spec["observation.state"].stats["mean"], stats["mean"])  # type: ignore[index]


def test_wrong_or_missing_stored_statistics_do_not_matter(tmp_path: Path) -> None:
    root = record(tmp_path / "d")
    before = LeRobotDataset(root).spec["action"].stats
    (root / "meta/stats.json").write_text("{}")
    after = LeRobotDataset(root).spec["action"].stats
    (root / "meta/stats.json").unlink()
    assert same(before, after) and same(before, LeRobotDataset(root).spec["action"].stats)


def test_the_spec_describes_every_role(tmp_path: Path) -> None:
    spec = LeRobotDataset(record(tmp_path / "d", cameras=True)).spec
    roles = {name: feature.role for name, feature in spec.features.items()}
    assert roles == {
        "observation.state": "state", "action": "action", "observation.images.top": "image",
        "observation.images.wrist": "image", "task_index": "task",
    }  # fmt: skip
    assert spec["task_index"].classes == 2 and spec.fps == 10
    top = spec["observation.images.top"]
    assert top.shape == (3, 32, 48) and top.dtype == "uint8" and top.stats is not None
    assert top.stats["mean"].shape == (3, 1, 1) and 0 < top.stats["mean"].min() < top.stats["mean"].max() < 1


def test_picture_statistics_are_those_of_the_pixels(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d", cameras=True))
    pixels = everything(dataset)["observation.images.wrist"].double() / 255
    stats = dataset.spec["observation.images.wrist"].stats
    assert stats is not None
    assert torch.allclose(stats["mean"].double().flatten(), pixels.mean((0, 2, 3)))
    assert torch.allclose(stats["std"].double().flatten(), pixels.std((0, 2, 3), correction=0), atol=1e-6)
    assert torch.equal(stats["max"].flatten(), pixels.amax((0, 2, 3)).float())


@pytest.mark.parametrize("cache_gb", [0.0, 0.0001])
def test_frames_above_the_budget_are_decoded_on_the_fly_and_equal(
    tmp_path: Path, cache_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    root = record(tmp_path / "d", cameras=True)
    cached = LeRobotDataset(root)
    with caplog.at_level(logging.WARNING, "etude.data"):
        lazy = LeRobotDataset(root, cache_gb=cache_gb)
    assert "decoded on the fly" in caplog.text
    for dataset in (cached, lazy):
        dataset.use_windows(observation=[-1, 0], action=[0, 1])
    assert same(everything(cached), everything(lazy))
    indices = np.array([17, 3, 3, 9, 0])
    assert same(cached.gather(indices, NO_KEYS[:5]), lazy.gather(indices, NO_KEYS[:5]))
    assert same(cached.spec["observation.images.top"].stats, lazy.spec["observation.images.top"].stats)


def test_decoding_on_the_fly_works_in_workers(tmp_path: Path) -> None:
    dataset = LeRobotDataset(record(tmp_path / "d", cameras=True), cache_gb=0.0)
    here = taken(MapData(dataset), [0, 1, 2], Place(batch_size=4))
    assert same(here, taken(MapData(dataset), [0, 1, 2], Place(batch_size=4, num_workers=2)))


def test_cameras_can_be_chosen(tmp_path: Path) -> None:
    root = record(tmp_path / "d", cameras=True)
    assert LeRobotDataset(root, cameras=["top"]).cameras == ["observation.images.top"]
    assert "observation.images.top" not in LeRobotDataset(root, cameras=[])[0]
    with pytest.raises(DataError, match="no camera 'front'; there are"):
        LeRobotDataset(root, cameras=["front"])


def test_the_cache_is_built_once_and_anew_when_the_data_changes(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = record(tmp_path / "d", cameras=True)
    built = []
    decode_all = source_module.decode_all

    def counted(*arguments: Any) -> Any:
        built.append(1)
        return decode_all(*arguments)

    monkeypatch.setattr(source_module, "decode_all", counted)
    LeRobotDataset(root)
    entries = sorted(path.name for path in cache_dir.glob("lerobot/*/*-*"))
    LeRobotDataset(root)
    assert len(built) == 2 and sorted(path.name for path in cache_dir.glob("lerobot/*/*-*")) == entries
    shutil.rmtree(root)
    record(root, (4, 4), cameras=True)
    assert len(LeRobotDataset(root)) == 8
    assert len(built) == 4
    assert len(list(cache_dir.glob("lerobot/*/*-*"))) == len(entries)


def test_caches_of_lost_datasets_are_dropped(tmp_path: Path, cache_dir: Path) -> None:
    LeRobotDataset(record(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    LeRobotDataset(record(tmp_path / "b"))
    assert [path.name[:1] for path in cache_dir.glob("lerobot/*")] == ["b"]


def test_a_damaged_cache_is_made_again(tmp_path: Path, cache_dir: Path) -> None:
    root = record(tmp_path / "d")
    before = everything(LeRobotDataset(root))
    for file in cache_dir.glob("lerobot/*/columns-*/*.npy"):
        file.write_bytes(file.read_bytes()[:100])
    assert same(before, everything(LeRobotDataset(root)))


def test_a_cache_that_cannot_be_written_is_put_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = record(tmp_path / "d")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "etude.data"):
        assert len(LeRobotDataset(root, cache_dir=tmp_path / "file" / "x")) == 18
    assert "cannot be written" in caplog.text


def test_what_lerobot_wrote_is_read_as_lerobot_reads_it() -> None:
    windows = {"action": [0, 0.1, 0.2], "observation.state": [-0.1, 0], "observation.images.top": [-0.1, 0]}
    dataset = LeRobotDataset(FOREIGN, delta_timestamps=windows)
    assert (len(dataset), dataset.num_episodes, dataset.fps) == (27, 3, 10.0)
    with np.load(FOREIGN / "expected.npz") as expected:
        batch = dataset.gather(expected["rows"], NO_KEYS[: len(expected["rows"])])
        assert [dataset.tasks[index] for index in batch["task_index"]] == expected["task"].tolist()
        for name in set(expected.files) - {"rows", "task"}:
            assert np.array_equal(batch[name].numpy(), expected[name]), name
    stored = json.loads((FOREIGN / "meta/stats.json").read_text())["observation.state"]
    stats = dataset.spec["observation.state"].stats
    assert stats is not None
    assert np.allclose(stats["mean"], stored["mean"], atol=1e-6) and np.allclose(stats["std"], stored["std"], atol=1e-6)
    assert dataset.spec["observation.state"].names == ("a", "b", "c", "d")


def as_version_2(root: Path, target: Path) -> Path:
    """Rewrite a dataset of ours as v2.1: one file an episode, metadata as JSON lines."""
    dataset = LeRobotDataset(root)
    info = json.loads((root / "meta/info.json").read_text())
    info |= {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    (target / "meta").mkdir(parents=True)
    (target / "data/chunk-000").mkdir(parents=True)
    (target / "meta/info.json").write_text(json.dumps(info))
    table = pq.read_table(root / "data/chunk-000/file-000.parquet")
    lines = []
    for number, (start, end) in enumerate(zip(dataset.source.episodes.starts, dataset.source.episodes.ends)):
        pq.write_table(table.slice(start, end - start), target / f"data/chunk-000/episode_{number:06d}.parquet")
        lines.append(
            {"episode_index": number, "tasks": dataset.source.episodes.tasks[number], "length": int(end - start)}
        )
    (target / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tasks = [{"task_index": number, "task": task} for number, task in enumerate(dataset.tasks)]
    (target / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    return target


def test_version_2_1_is_read_alike(tmp_path: Path) -> None:
    root = record(tmp_path / "d")
    old = LeRobotDataset(as_version_2(root, tmp_path / "v2"))
    assert same(everything(LeRobotDataset(root)), everything(old))
    assert old.tasks == LeRobotDataset(root).tasks


def test_version_2_1_videos_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.data.lerobot import commit

    monkeypatch.setattr(commit.layout, "VIDEO_FILES_SIZE_IN_MB", 0)
    root = record(tmp_path / "d", cameras=True)
    target = as_version_2(root, tmp_path / "v2")
    folder = target / "videos/chunk-000/observation.images.top"
    folder.mkdir(parents=True)
    for number, file in enumerate(sorted((root / "videos").rglob("*.mp4"))):
        shutil.copy(file, folder / f"episode_{number:06d}.mp4")
    assert same(everything(LeRobotDataset(root)), everything(LeRobotDataset(target)))


def test_shapes_and_types_of_all_kinds_come_back(tmp_path: Path) -> None:
    features: dict[str, dict[str, Any]] = {
        "action": {"dtype": "float64", "shape": (3,)},
        "next.reward": {"dtype": "float32", "shape": (1,)},
        "next.done": {"dtype": "bool", "shape": (1,)},
        "grid": {"dtype": "int16", "shape": (2, 3)},
        "observation.images.depth": {"dtype": "image", "shape": (16, 16, 1)},
    }
    from etude.data.lerobot import LeRobotWriter

    with LeRobotWriter(tmp_path / "d", features, 12.5) as writer:
        for frame in range(3):
            writer.add_frame({
                "action": np.full(3, frame, np.float64), "next.reward": frame, "next.done": frame == 2,
                "grid": np.full((2, 3), frame), "observation.images.depth": np.full((16, 16, 1), frame, np.uint8),
            })  # fmt: skip
        writer.save_episode("x")
    batch = everything(LeRobotDataset(tmp_path / "d"))
    assert batch["action"].dtype == torch.float32 and batch["action"].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert batch["next.reward"].tolist() == [[0], [1], [2]]
    assert batch["next.done"].tolist() == [[False], [False], [True]]
    assert batch["grid"].shape == (3, 2, 3) and batch["grid"].dtype == torch.int16
    assert batch["observation.images.depth"][:, 0, 0, 0].tolist() == [0, 1, 2]


def test_text_columns_are_left_alone(tmp_path: Path) -> None:
    root = record(tmp_path / "d")
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["note"] = {"dtype": "string", "shape": [1], "names": None}
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/etude.json").unlink()
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("note", pa.array(["x"] * len(table))), path)
    assert "note" not in LeRobotDataset(root)[0]


@pytest.mark.slow
def test_processes_that_open_it_at_once_share_one_cache(tmp_path: Path, cache_dir: Path) -> None:
    root = record(tmp_path / "d", (20, 20, 20), cameras=True)
    program = f"from etude.data.lerobot import LeRobotDataset; print(LeRobotDataset({str(root)!r})[59]['index'].item())"
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=100)[0].strip() for child in children] == ["59"] * 3
    assert len(list(cache_dir.glob("lerobot/*/frames_*"))) == 2
