"""Mutual information: bounds that hold, against Gaussians whose information is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude.algorithms.components.information import MutualInformation, infonce, log_lerp, mine
from etude.errors import DataError
from tests.component_models import graph, mlp

DIMS, CORRELATION = 2, 0.8
TRUTH = -0.5 * DIMS * math.log(1 - CORRELATION**2)  # 1.02 nats


def gaussians(count: int, correlation: float = CORRELATION) -> dict[str, Tensor]:
    state = torch.randn(count, DIMS)
    action = correlation * state + math.sqrt(1 - correlation**2) * torch.randn(count, DIMS)
    return {"observation.state": state, "action": action.unsqueeze(1)}


def make(bound: Any = "infonce", **params: Any) -> MutualInformation:
    torch.manual_seed(0)
    models = nn.ModuleDict()
    for name, shape in (("state", ["B", DIMS]), ("action", ["B", 1, DIMS])):
        nodes = [
            {"name": "flat", "call": "op:flatten", "args": [f"${name}", 1]},
            {"name": "out", "call": "module:layers", "args": ["$flat"]},
        ]
        layers = {**mlp(DIMS, 16), "hidden": [64]}
        models[f"{name}_encoder"] = graph({name: {"shape": shape}}, {"layers": layers}, nodes, ["$out"])
    optimizers = {"all": torch.optim.AdamW(models.parameters(), 3e-3)}
    return MutualInformation(models, optimizers, None, torch.device("cpu"), bound=bound, **params)


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["infonce", "mine"])
@pytest.mark.parametrize("correlation, truth", [(CORRELATION, TRUTH), (0.0, 0.0)])
def test_the_information_of_gaussians_is_found_from_below(bound: Any, correlation: float, truth: float) -> None:
    trainer = make(bound)
    for _ in range(400):
        found = trainer.train_step(gaussians(128, correlation))
    fresh = [float(trainer.estimate(trainer.models, gaussians(512, correlation), bound)) for _ in range(8)]
    estimate = sum(fresh) / len(fresh)
    assert truth - max(0.1 * truth, 0.03) < estimate < truth + 0.05
    assert float(found["mutual_information_running"]) == pytest.approx(truth, abs=0.15)


def test_infonce_is_the_mean_log_probability_of_the_right_pair() -> None:
    scores = torch.randn(6, 6)
    by_hand = sum(math.log(6) + math.log(float(scores[i].softmax(0)[i])) for i in range(6)) / 6
    assert float(infonce(scores)) == pytest.approx(by_hand, abs=1e-5)
    assert float(infonce(100 * torch.eye(6))) == pytest.approx(math.log(6))  # as much as it can ever say
    assert float(infonce(torch.zeros(6, 6))) == pytest.approx(0.0, abs=1e-6)


def test_mine_compares_right_pairs_with_wrong_ones() -> None:
    scores = torch.randn(5, 5)
    wrong = [float(scores[i, j].exp()) for i in range(5) for j in range(5) if i != j]
    by_hand = float(scores.diagonal().mean()) - math.log(sum(wrong) / len(wrong))
    found, partition = mine(scores)
    assert float(found) == pytest.approx(by_hand, abs=1e-5)
    assert float(partition) == pytest.approx(math.log(sum(wrong) / len(wrong)), abs=1e-5)


def test_the_partition_is_averaged_where_it_is_summed() -> None:
    new, old = torch.tensor(1.0), torch.tensor(2.0)
    assert float(log_lerp(new, old, 0.9)) == pytest.approx(math.log(0.9 * math.exp(2) + 0.1 * math.exp(1)), abs=1e-5)
    assert float(log_lerp(new, old, 0.0)) == 1.0


def test_one_sample_has_no_wrong_pairs() -> None:
    with pytest.raises(DataError, match="at least two samples a batch"):
        make().train_step(gaussians(1))
