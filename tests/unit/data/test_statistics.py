"""Statistics that came with data: batches are normalised by them, and actions come back in the data's units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.data.statistics import NormStats
from etude.errors import DataError

STATS: dict[str, Any] = {
    "action": {"mean": [1.0, 2.0, 3.0], "std": [2.0, 0.0, 1e-12]},
    "observation.state": {"mean": np.array([0.5, 0.5]), "std": np.array([0.1, 0.2]), "count": [7]},
    "observation.bounded": {"min": [0.0, 3.0], "max": [4.0, 3.0]},
}


def test_every_named_key_is_normalised_by_the_formula_and_constants_become_zero() -> None:
    batch = {
        "action": torch.tensor([[[3.0, 9.0, 4.0]]]),
        "observation.state": torch.tensor([[0.6, 0.1]], dtype=torch.float64),
        "observation.bounded": torch.tensor([[1.0, 8.0]]),
        "task_index": torch.tensor([5]),
    }
    found = NormStats.from_any(STATS).normalize(batch)
    assert found["action"].tolist() == [[[1.0, 0.0, 0.0]]]  # a floor of 1e-8 would make 7e8 and 1e8 of the last two
    torch.testing.assert_close(found["observation.state"], torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    assert found["observation.bounded"].tolist() == [[-0.5, 0.0]]
    assert found["task_index"] is batch["task_index"]
    assert batch["action"][0, 0, 0] == 3.0  # the data's own tensors stay


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_pictures_are_normalised_in_the_units_of_their_statistics(scale: float) -> None:
    """As they are stored, and as they come from a camera when the policy acts."""
    stats = {"observation.images.head": {"mean": [[[0.5 * scale]]] * 3, "std": [[[0.25 * scale]]] * 3}}
    pictures = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 4, 4)
    found = NormStats.from_any(stats).normalize({"observation.images.head": pictures})["observation.images.head"]
    torch.testing.assert_close(found[:, 0, 0, 0], torch.tensor([-2.0, 2.0]))


def test_actions_come_back_in_the_units_of_the_data() -> None:
    stats = NormStats.from_any(STATS)
    assert stats.unnormalize_action(torch.tensor([[1.0, 5.0, -4.0]])).tolist() == [[3.0, 2.0, 3.0]]
    assert torch.equal(stats.unnormalize("unnamed", torch.ones(2)), torch.ones(2))


def test_statistics_go_through_json_and_files_without_loss(tmp_path: Path) -> None:
    stats = NormStats.from_any(STATS)
    text = json.dumps(stats.to_json())
    (tmp_path / "dataset_stats.json").write_text(text)
    for again in (
        NormStats.from_json(text), NormStats.from_json(stats.to_json()), NormStats.from_any(stats),
        NormStats.from_any(tmp_path / "dataset_stats.json"),
    ):  # fmt: skip
        assert again.differs_from(stats.values) == []
        assert again.to_json() == stats.to_json()


@pytest.mark.parametrize(
    "stats, said",
    [
        (3, r"must be \{key: \{mean, std\}\}, got int"),
        ({"action": [1.0]}, "got list for 'action'"),
        ({"action": {"q01": [0.0]}}, "'action' have no mean and std, but q01"),
        ({"action": {"mean": [0.0]}}, "action has no std in its statistics"),
        ({"action": {"mean": ["x"], "std": [1.0]}}, "'action' are not numbers"),
        ({"action": {"mean": [0.0], "std": [float("nan")]}}, "not finite"),
        ({"action": {"mean": [0.0], "std": [-1.0]}}, "contradict themselves"),
        ("{", "not JSON"),
    ],
)
def test_statistics_that_mean_nothing_are_refused(stats: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        NormStats.from_json(stats)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    stats = NormStats.from_any({"action": {"mean": [[0.0]] * 4, "std": [[1.0]] * 4}})
    for wrong in (torch.ones(1), torch.ones(2, 3, 1)):
        with pytest.raises(DataError, match=r"'action' have shape \(4, 1\), which does not fit"):
            stats.normalize({"action": wrong})
    with pytest.raises(DataError, match="norm_stats name action, none of which is in the batch: act"):
        stats.normalize({"act": torch.ones(4, 1)})
