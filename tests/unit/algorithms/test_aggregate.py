"""Aggregation: what the engine divides, for every way of counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.algorithms.aggregate import Aggregation, aggregate
from etude.errors import ConfigError

MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
LOSS = np.array([[1.0, 2.0, np.nan, np.nan], [3.0, 4.0, 5.0, 6.0], [np.nan] * 4])
ALL: list[Aggregation] = ["token_mean", "token_sum", "sequence_mean", "length_normalised"]


@pytest.mark.parametrize(
    "how, total, weight",
    [("token_mean", 21.0, 6), ("token_sum", 21.0, 2), ("sequence_mean", 6.0, 2), ("length_normalised", 2.1, 2)],
)
def test_totals_and_weights(how: Aggregation, total: float, weight: int) -> None:
    tokens = torch.as_tensor(LOSS).requires_grad_()
    found = aggregate(tokens, torch.as_tensor(MASK), how, length=10, metrics={"same": tokens.detach()})
    assert (found.total.item(), float(found.weight)) == (pytest.approx(total), weight)
    found.total.backward()
    assert tokens.grad is not None
    rate = {"sequence_mean": MASK / np.maximum(MASK.sum(1, keepdims=True), 1), "length_normalised": MASK / 10.0}
    np.testing.assert_allclose(tokens.grad.numpy(), rate.get(how, MASK))
    assert float(found.metrics["same"]) == pytest.approx(3.5 if how == "token_mean" else 3.0)


@pytest.mark.parametrize("how", ALL)
def test_nothing_that_counts_weighs_nothing(how: Aggregation) -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        tokens = torch.full(shape, torch.nan, requires_grad=True)
        found = aggregate(tokens, torch.zeros(shape), how, metrics={"m": tokens})
        assert found.total.item() == float(found.weight) == found.metrics["m"].item() == 0.0
        found.total.backward()
        assert tokens.grad is not None and tokens.grad.abs().sum() == 0


def test_the_width_of_the_batch_is_the_default_length() -> None:
    assert aggregate(torch.as_tensor(LOSS), torch.as_tensor(MASK), "length_normalised").total.item() == 21 / 4
    with pytest.raises(ConfigError, match="choose from token_mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "median")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how, total, weight", [("token_mean", 4004 * 0.5, 4004), ("sequence_mean", 2 * 0.5, 2)])
def test_sums_and_weights_below_float32_are_float32(
    dtype: torch.dtype, how: Aggregation, total: float, weight: int
) -> None:
    tokens = torch.full((2, 2002), 0.5, dtype=dtype, requires_grad=True)
    found = aggregate(tokens, torch.ones(2, 2002, dtype=dtype), how, metrics={"same": tokens.detach()})
    assert isinstance(found.weight, torch.Tensor) and found.weight.dtype == found.total.dtype == torch.float32
    assert (found.total.item(), float(found.weight), float(found.metrics["same"])) == (total, weight, 0.5)
