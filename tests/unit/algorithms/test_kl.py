"""Estimators of divergence: values, gradients in expectation, and controllers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from etude.algorithms.kl import AdaptiveKLController, FixedKLController, Kind, kl, kl_penalty
from etude.errors import ConfigError

LOGITS, REFERENCE = np.array([0.3, -1.0, 0.8, 0.1]), np.array([-0.2, 0.4, 0.5, -0.9])
P, Q = (np.exp(x) / np.exp(x).sum() for x in (LOGITS, REFERENCE))
REVERSE = float((P * np.log(P / Q)).sum())


@pytest.mark.parametrize(
    "kind, name, expected",
    [("k1", "kl", -0.05), ("abs", "abs", 0.05), ("k2", "mse", 0.00125), ("k3", "low_var_kl", 0.0012711)],
)
def test_estimates_of_one_difference(kind: Kind, name: str, expected: float) -> None:
    new, ref = torch.tensor([[-1.05]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64)
    assert kl(new, ref, kind).item() == pytest.approx(expected, abs=1e-7)
    assert kl_penalty(new, ref, name).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: Kind) -> None:
    estimate = kl(torch.as_tensor(np.log(P)), torch.as_tensor(np.log(Q)), kind).numpy()
    assert float((P * estimate).sum()) == pytest.approx(REVERSE, abs=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradients_as_a_loss_are_those_of_the_table(kind: Kind) -> None:
    """The mean over tokens sampled from p of the estimator's gradient, exactly, by summing over all tokens."""
    logits = torch.as_tensor(LOGITS).requires_grad_()
    log_p = logits.log_softmax(0)
    (torch.as_tensor(P) * kl(log_p, torch.as_tensor(np.log(Q)), kind)).sum().backward()
    reverse, forward = P * (np.log(P / Q) - REVERSE), P - Q
    expected = {"k1": np.zeros(4), "k2": reverse, "k3": forward}[kind]
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_what_is_masked_has_no_part(kind: Kind) -> None:
    new = torch.tensor([[torch.nan, -1.0]], requires_grad=True)
    found = kl(new, torch.tensor([[torch.inf, -2.0]]), kind, mask_BT=torch.tensor([[0, 1]]))
    found.sum().backward()
    assert found[0, 0] == 0 and new.grad is not None and new.grad[0, 0] == 0 and new.grad.isfinite().all()


@pytest.mark.parametrize("delta", [-19.5, -8.0, -3.0, 0.0, 5.0, 12.0, 60.0, 1e4])
def test_k3_is_what_it_says_wherever_it_does_not_overflow(delta: float) -> None:
    new = torch.tensor([delta], dtype=torch.float64, requires_grad=True)
    found = kl_penalty(new, torch.zeros(1, dtype=torch.float64), "low_var_kl")
    found.backward()
    assert found.item() == pytest.approx(math.exp(-delta) + delta - 1, rel=1e-12)
    assert new.grad is not None and new.grad.item() == pytest.approx(1 - math.exp(-delta), rel=1e-12)


def test_k3_goes_on_as_its_tangent_where_it_would_overflow() -> None:
    new = torch.tensor([-25.0, -500.0, -1e4], requires_grad=True)
    found = kl(new, torch.zeros(3), "k3")
    found.sum().backward()
    edge, slope = math.exp(20) - 21, math.exp(20) - 1
    assert found.tolist() == pytest.approx([edge + slope * (-delta - 20) for delta in (-25.0, -500.0, -1e4)], rel=1e-6)
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-slope] * 3, rel=1e-6)


def test_unknown_kinds_are_refused() -> None:
    far = torch.zeros(1)
    with pytest.raises(ConfigError, match="choose from kl, abs"):
        kl_penalty(far, far, "other")
    with pytest.raises(ConfigError, match="choose from k1"):
        kl(far, far, "k9")  # type: ignore[arg-type]


def test_controllers() -> None:
    fixed, adaptive = FixedKLController(0.1), AdaptiveKLController(0.1, 6.0, 1e4)
    for controller in (fixed, adaptive):
        controller.update(8.0, 100)
    assert fixed.value == 0.1 and adaptive.value == pytest.approx(0.1002, abs=1e-9)
    adaptive.update(0.0, 100)
    assert adaptive.value == pytest.approx(0.1002 * 0.998)
    with pytest.raises(ConfigError, match="positive target"):
        AdaptiveKLController(0.1, 0.0, 1)
