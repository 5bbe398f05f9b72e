from __future__ import annotations

from typing import Any

import pytest
import torch

from etude import Batch, DataSpec, Feature, Loss, Trajectory
from etude.types import batch_length


@pytest.mark.parametrize(
    "batch,length",
    [
        (torch.zeros(3, 2), 3),
        ({"x": torch.zeros(4, 2), "y": 1}, 4),
        ((torch.zeros(5), torch.zeros(5)), 5),
        ([torch.zeros(2, 2)], 2),
        ({"nested": {"x": torch.zeros(6)}}, 6),
        ([1, 2, 3], 3),
        (Batch({"x": torch.zeros(7, 1)}), 7),
        (None, 1),
    ],
)
def test_a_batch_knows_how_many_samples_it_holds(batch: Any, length: int) -> None:
    assert batch_length(batch) == length


def test_a_mean_becomes_a_sum_weighed_by_the_batch() -> None:
    loss = Loss.of({"loss": torch.tensor(2.0), "accuracy": 0.5, "note": "text"}, {"x": torch.zeros(4, 1)})
    assert float(loss.total) == 8.0
    assert loss.weight == 4
    assert loss.metrics == {"accuracy": 0.5}


def test_a_loss_passes_as_it_is_even_inside_a_dictionary() -> None:
    loss = Loss(torch.tensor(6.0), 3, {"a": 1.0})
    assert Loss.of(loss, None) is not None
    inner = Loss.of({"loss": loss, "b": 2.0}, None)
    assert (float(inner.total), inner.weight, inner.metrics) == (6.0, 3, {"a": 1.0, "b": 2.0})
    assert float(Loss.mean(torch.tensor(2.0), 3).total) == 6.0


def test_features_are_found_by_role() -> None:
    spec = DataSpec({"observation.state": Feature((3,), role="state"), "action": Feature((2,), role="action")})
    assert list(spec) == ["observation.state", "action"]
    assert list(spec.with_role("action")) == ["action"]
    assert spec["action"].shape == (2,)


def test_the_tensors_of_a_batch_have_one_length() -> None:
    batch = Batch({"x": torch.zeros(2, 3)}, {"rewards": [1, 2]})
    assert len(batch) == 2
    assert batch["rewards"].tolist() == [1, 2]
    assert batch.to("cpu")["x"].shape == (2, 3)
    with pytest.raises(ValueError, match="one length"):
        Batch({"x": torch.zeros(2), "y": torch.zeros(3)})


def test_a_trajectory_has_fields_and_room_for_more() -> None:
    trajectory = Trajectory(reward=1.0)
    trajectory["run_id"] = "a"
    trajectory["advantage"] = 0.5
    assert trajectory.advantage == 0.5
    assert trajectory.get("run_id") == "a"
    assert trajectory.get("missing", "default") == "default"
    assert trajectory.extra_fields == {"run_id": "a", "advantage": 0.5}
