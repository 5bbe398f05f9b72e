"""The dataset factory on top of the LeRobot reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.data.lerobot.factory import LeRobotDatasetFactory
from etude.data.statistics import NormStats
from etude.errors import DataError
from tests.unit.data.lerobot.recordings import record

TOP = "observation.images.top"


def build(**params: Any) -> dict[str, Any]:
    return LeRobotDatasetFactory().build({"local_rank": 0, "dist_enabled": False, "save_dir": "x"}, params)


def rows(*numbers: int) -> tuple[Any, Any]:
    return np.array(numbers), np.zeros(len(numbers), dtype=np.uint64)


@pytest.mark.slow
def test_samples_have_actions_ahead_and_histories_behind_the_oldest_first(tmp_path: Path) -> None:
    root = record(tmp_path / "data", (6, 5), cameras=True)
    built = build(
        root=str(root), repo_id="toy/data", local_files_only=True, HZ=10, action_horizon=4, obs_proprio_history=2,
        obs_images_history=3, task_name="push",
    )  # fmt: skip
    batch = built["dataset"].gather(*rows(4, 6))
    assert batch["action"][:, :, 0].tolist() == [[40, 50, 50, 50], [1000, 1010, 1020, 1030]]
    assert batch["action_is_pad"].tolist() == [[False, False, True, True], [False] * 4]
    assert batch["observation.state"][:, :, 0].tolist() == [[30, 40], [1000, 1000]]
    assert batch[TOP].shape == (2, 3, 3, 32, 48)
    assert batch[TOP].dtype == torch.uint8
    normal = NormStats.from_any(built["norm_stats"]).normalize(batch)
    everything = built["dataset"].gather(*rows(*range(11)))
    values = everything["action"][:, 0]
    torch.testing.assert_close(
        normal["action"][:, 0], (batch["action"][:, 0] - values.mean(0)) / values.std(0, correction=0)
    )
    assert normal[TOP].dtype == torch.float32
    assert set(built["norm_stats"]) == {"action", "observation.state", TOP, "observation.images.wrist"}


def test_a_lower_rate_takes_every_second_frame(tmp_path: Path) -> None:
    root = str(record(tmp_path / "data", (9,)))
    batch = build(root=root, HZ=5, action_horizon=3, obs_proprio_history=2)["dataset"].gather(*rows(2))
    assert batch["action"][0, :, 0].tolist() == [20, 40, 60]
    assert batch["observation.state"][0, :, 0].tolist() == [0, 20]
    for rate in (4, 20):
        with pytest.raises(DataError, match=f"HZ {rate} does not divide the dataset's 10 frames a second"):
            build(root=root, HZ=rate)


def test_the_dataset_is_looked_for_in_the_root_and_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "toy" / "data")
    for found in ({"root": str(tmp_path / "toy" / "data")}, {"root": str(tmp_path), "repo_id": "toy/data"}):
        assert len(build(**found)["dataset"]) == 18
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    assert len(build(repo_id="toy/data")["dataset"]) == 18
    with pytest.raises(DataError, match=r"no LeRobot dataset in .*elsewhere or .*elsewhere/toy/data"):
        build(root=str(tmp_path / "elsewhere"), repo_id="toy/data")
    with pytest.raises(DataError, match="needs a root or a repo_id"):
        build()


def test_statistics_come_from_the_training_episodes(tmp_path: Path) -> None:
    root = str(record(tmp_path / "data", (6, 5, 7, 4)))
    train, held_out = (build(root=root, split=split, val_fraction=0.25) for split in ("train", "validation"))
    assert (train["dataset"].num_episodes, held_out["dataset"].num_episodes) == (3, 1)
    assert not set(train["dataset"].episodes) & set(held_out["dataset"].episodes)
    assert np.array_equal(train["norm_stats"]["action"]["mean"], held_out["norm_stats"]["action"]["mean"])


def test_a_policy_may_ask_for_the_same_windows_only(tmp_path: Path) -> None:
    dataset = build(root=str(record(tmp_path / "data")), action_horizon=4)["dataset"]
    dataset.use_windows(observation=None, action=[0, 1, 2, 3])
    assert dataset.gather(*rows(0))["observation.state"].shape == (1, 4)
    with pytest.raises(DataError, match="the policy plans 2 actions, and the data is told to hold 4"):
        dataset.use_windows(action=[0, 1])
