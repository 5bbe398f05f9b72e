"""Mixture: exact shares, every epoch of each dataset complete, the same batches from any step on."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

from etude.data import LeRobotDataset, Mixture, MixtureData, evaluation_batches
from etude.errors import DataError
from etude.types.protocols import Place
from tests.unit.data.lerobot.recordings import FEATURES, everything, record
from tests.unit.data.sources import same, taken


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pair(tmp_path: Path) -> list[LeRobotDataset]:
    return [LeRobotDataset(record(tmp_path / "a", (6, 5))), LeRobotDataset(record(tmp_path / "b", (30, 9, 11)))]


def test_shares_are_exact_and_epochs_complete(pair: list[LeRobotDataset]) -> None:
    data = MixtureData(Mixture(pair, [3, 1]))
    steps = taken(data, list(range(64)), Place(batch_size=16))
    batches = [batch for (batch,) in steps]
    origins = torch.cat([batch["dataset_index"] for batch in batches])
    assert Counter(origins.tolist()) == {0: 768, 1: 256}
    assert 0 < torch.cat([batch["dataset_index"] for batch in batches[:2]]).float().mean() < 0.6
    drawn = torch.cat([batch["index"][batch["dataset_index"] == 1] for batch in batches]).tolist()
    assert all(sorted(drawn[first : first + 50]) == list(range(50)) for first in range(0, 250, 50))


def test_batches_are_functions_of_seed_and_step(pair: list[LeRobotDataset]) -> None:
    data = MixtureData(Mixture(pair, [1, 1]))
    place = Place(seed=3, batch_size=8)
    straight = taken(data, list(range(150)), place)
    assert same(straight[140:], taken(data, list(range(140, 150)), place))
    assert not same(straight[:1], taken(data, [0], Place(seed=4, batch_size=8)))
    halves = [taken(data, [0], Place(seed=3, batch_size=4, world=2, rank=rank)) for rank in range(2)]
    joined = torch.cat([half[0][0]["index"] for half in halves])
    assert torch.equal(joined, straight[0][0]["index"])


def test_samples_keep_their_values_and_order(pair: list[LeRobotDataset]) -> None:
    mixture = Mixture(pair)
    assert len(mixture) == 61 and mixture.weights == pytest.approx([11 / 61, 50 / 61])
    indices = np.array([60, 0, 11, 10, 5])
    batch = mixture.gather(indices, np.zeros(5, np.uint64))
    assert batch["dataset_index"].tolist() == [1, 0, 1, 0, 0]
    assert batch["index"].tolist() == [49, 0, 0, 10, 5]
    for row, index in enumerate(indices):
        assert same({name: values[row] for name, values in batch.items()}, mixture[int(index)])


def test_windows_and_tasks_cover_all_datasets(pair: list[LeRobotDataset], tmp_path: Path) -> None:
    mixture = Mixture(pair)
    mixture.use_windows(observation=[-1, 0], action=[0, 1, 2])
    batch = mixture.gather(np.array([0, 20]), np.zeros(2, np.uint64))
    assert batch["action"].shape == (2, 3, 2) and batch["action_is_pad"].shape == (2, 3)
    pair[1].tasks[:] = ["lift the block", "fold the towel"]
    other = Mixture(pair)
    assert other.tasks == ["push the block", "lift the block", "fold the towel"]
    assert other.gather(np.array([0, 11, 41]), np.zeros(3, np.uint64))["task_index"].tolist() == [0, 1, 2]
    assert other.spec["task_index"].classes == 3


def test_statistics_are_those_of_what_is_drawn(pair: list[LeRobotDataset]) -> None:
    first, second = (everything(dataset)["action"].double().numpy() for dataset in pair)
    stats = Mixture(pair, [3, 1]).spec["action"].stats
    assert stats is not None
    drawn = np.concatenate([np.repeat(first, 3 * 50, 0), np.repeat(second, 11, 0)])
    assert np.allclose(stats["mean"], drawn.mean(0)) and np.allclose(stats["std"], drawn.std(0))
    assert np.allclose(stats["q50"], np.quantile(drawn, 0.5, axis=0), atol=60)
    assert np.allclose(stats["min"], drawn.min(0)) and np.allclose(stats["max"], drawn.max(0))


def test_evaluation_passes_over_everything_once(pair: list[LeRobotDataset]) -> None:
    batches = list(evaluation_batches(MixtureData(Mixture(pair)), Place(batch_size=20)))
    assert torch.cat([batch["index"] for batch in batches]).tolist() == [*range(11), *range(50)]


def test_features_that_differ_are_left_out_or_refused(
    pair: list[LeRobotDataset], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {**FEATURES, "next.reward": {"dtype": "float32", "shape": (1,)}}
    with caplog.at_level(logging.WARNING, "etude.data"):
        mixture = Mixture([pair[0], LeRobotDataset(record(tmp_path / "c", features=extra))])
    assert "next.reward" in caplog.text and "next.reward" not in mixture[12]
    wide = {**FEATURES, "action": {"dtype": "float32", "shape": (3,)}}
    with pytest.raises(DataError, match="'action' has different shapes"):
        Mixture([pair[0], LeRobotDataset(record(tmp_path / "w", features=wide))])


def test_wrong_weights_are_refused(pair: list[LeRobotDataset]) -> None:
    for weights in ([1], [1, 0], [1, -1], [1, float("nan")]):
        with pytest.raises(DataError, match="positive weights"):
            Mixture(pair, weights)
    with pytest.raises(DataError, match="so small a weight"):
        MixtureData(Mixture(pair, [1, 1e-6]))
