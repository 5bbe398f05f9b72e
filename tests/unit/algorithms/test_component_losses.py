"""The losses that components are trained with, against their formulas."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError, MissingExtraError
from etude.registry import LOSS_BUILDER_REGISTRY


def build(key: str, **params: Any) -> Any:
    factory: Any = LOSS_BUILDER_REGISTRY.get(key)
    return factory(**params).build()


def pairs(count: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(count, 3, 2), (count, 3, 2), (count, 4), (count, 4)]
    one, two, three, four = (torch.randn(shape, generator=random) for shape in shapes)
    return one, two, three, four


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_reduction_of_l2_loss_is_that_of_the_configuration(reduction: str) -> None:
    squares = torch.tensor([[1.0, 4.0]])
    found = build("l2_loss", reduction=reduction)(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2))
    expected = {"mean": squares.mean(), "sum": squares.sum(), "none": squares}[reduction]
    assert torch.equal(found, expected)
    assert build("l2_loss").reduction == "mean"


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("lam_state", [0.0, 0.2, 3.0])
def test_transport_costs_what_the_best_assignment_costs(p: int, lam_state: float) -> None:
    actions, wanted, states, states_wanted = pairs()
    squares = (actions[:, None] - wanted[None]).square().sum((2, 3))
    squares = squares + lam_state * (states[:, None] - states_wanted[None]).square().sum(2)
    costs = squares ** (p / 2)
    best = min(sum(costs[i, j] for i, j in enumerate(order)) for order in itertools.permutations(range(5)))
    loss = build("sinkhorn_knopp", p=p, lam_state=lam_state, blur=1e-3, scaling=0.9)
    assert float(loss(actions, wanted, states, states_wanted)) == pytest.approx(float(best) / 5, rel=1e-4)


def test_transport_is_zero_from_a_cloud_to_itself_in_any_order_and_pulls_predictions_to_their_targets() -> None:
    actions, wanted, states, _ = pairs()
    loss = build("sinkhorn_knopp", p=2, blur=1e-3)
    shuffled = torch.tensor([3, 1, 4, 0, 2])
    assert abs(float(loss(actions, actions[shuffled], states, states[shuffled]))) < 1e-5
    predicted = actions.clone().requires_grad_()
    loss(predicted, wanted).backward()
    assert predicted.grad is not None
    moved = actions - 0.5 * 5 * predicted.grad  # half the gradient of a mean of 5 squares is what is missing
    assert float(loss(moved, wanted)) < 1e-5


def test_transport_is_computed_in_float32_under_autocast() -> None:
    given = pairs()
    loss = build("sinkhorn_knopp")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(*given)
        rounded = loss(*(value.bfloat16() for value in given))
    assert found.dtype == rounded.dtype == torch.float32
    assert torch.equal(found, loss(*given))


@pytest.mark.parametrize(
    "params, said",
    [
        ({"p": 3}, "p must be 1 or 2"),
        ({"blur": 0.0}, "blur must be positive"),
        ({"scaling": 1.0}, "scaling must lie between 0 and 1"),
        ({"lam_state": -1.0}, "lam_state must not be negative"),
        ({"backend": "tensor"}, "backend must be auto, tensorized"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"loss 'sinkhorn_knopp': {said}"):
        build("sinkhorn_knopp", **params)
    with pytest.raises(ConfigError, match="reduction must be mean, sum or none, got 'mena'"):
        build("l2_loss", reduction="mena")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pykeops", None)
    with pytest.raises(MissingExtraError, match="backend 'online' needs pykeops"):
        build("sinkhorn_knopp", backend="online")
    monkeypatch.setitem(sys.modules, "geomloss", None)
    with pytest.raises(MissingExtraError, match=r"geomloss cannot be imported .*; run: pip install 'etude\[components"):
        build("sinkhorn_knopp")


def test_the_z_loss_is_the_mean_squared_log_of_the_sum_of_exponentials() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 3.0]], requires_grad=True)
    expected = (torch.tensor([2.0]).log() ** 2 + (torch.tensor([1.0]).exp() + torch.tensor([3.0]).exp()).log() ** 2) / 2
    found = build("router_z_loss")(logits)
    torch.testing.assert_close(found, expected.squeeze())
    found.backward()


@pytest.mark.parametrize("chosen, share", [([[1, 1, 0, 0], [0, 0, 1, 1]], 1.0), ([[1, 0, 0, 0], [1, 0, 0, 0]], 4.0)])
def test_load_balancing_is_one_when_even_and_the_number_of_experts_when_one_gets_all(
    chosen: list[list[int]], share: float
) -> None:
    chosen_BE = torch.tensor(chosen)
    probabilities = (chosen_BE / chosen_BE.sum(1, keepdim=True)).requires_grad_()
    found = build("load_balancing")(probabilities, chosen_BE)
    assert float(found.detach()) == pytest.approx(share)
    found.backward()
    # By hand: E / B times the share of the choices that went to each expert.
    assert probabilities.grad is not None
    torch.testing.assert_close(probabilities.grad, (4 / 2 * chosen_BE.sum(0) / chosen_BE.sum()).expand(2, 4))


def test_every_parameter_can_be_said_in_a_configuration() -> None:
    names = {key: [p.name for p in LOSS_BUILDER_REGISTRY.signature(key).parameters] for key in LOSS_BUILDER_REGISTRY}
    assert names["l2_loss"] == ["reduction"]
    assert names["sinkhorn_knopp"] == ["p", "lam_state", "blur", "debias", "backend", "scaling"]
