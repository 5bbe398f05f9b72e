from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.policies.flow import TIME_SCALE, FlowMatching, Solver, TimeSampling, integrate, sample_times
from tests.unit.policies.demonstrations import make_batch, make_spec

MEAN, STD = 0.6, 0.3


def gaussian_velocity(point: Tensor, time_B: Tensor) -> Tensor:
    """The mean of data - noise at a point, if the data were N(MEAN, STD^2)."""
    t = time_B.view(-1, *[1] * (point.dim() - 1))
    slope = (t * STD**2 - (1 - t)) / (t**2 * STD**2 + (1 - t) ** 2)
    return MEAN + slope * (point - t * MEAN)


@pytest.mark.parametrize("solver", ["euler", "midpoint"])
def test_the_solvers_recover_a_gaussian_from_its_velocity(solver: Solver) -> None:
    torch.manual_seed(0)
    start = torch.randn(20000, dtype=torch.float64)
    found = integrate(gaussian_velocity, start, 100, solver)
    # The flow of a Gaussian is known: every point keeps its place in units of the standard deviation.
    torch.testing.assert_close(found, MEAN + STD * start, atol=0.03 if solver == "euler" else 2e-4, rtol=0)


@pytest.mark.parametrize("solver, order", [("euler", 1), ("midpoint", 2)])
def test_solvers_converge_at_their_order(solver: Solver, order: int) -> None:
    """For x' = x + t, x(0) = 1, which ends at 2 e - 2."""
    start = torch.ones(1, dtype=torch.float64)
    ends = [integrate(lambda x, t: x + t, start, steps, solver).item() for steps in (40, 80)]
    misses = [abs(end - (2 * math.e - 2)) for end in ends]
    assert math.log2(misses[0] / misses[1]) == pytest.approx(order, abs=0.05)


@pytest.mark.parametrize("solver, calls", [("euler", 5), ("midpoint", 10)])
def test_the_network_is_asked_as_often_as_promised(solver: Solver, calls: int) -> None:
    times: list[float] = []

    def velocity(point: Tensor, time_B: Tensor) -> Tensor:
        times.append(time_B[0].item())
        return torch.ones_like(point)

    assert torch.allclose(integrate(velocity, torch.zeros(2, 3), 5, solver), torch.ones(2, 3))
    assert len(times) == calls
    assert times[0] == 0
    assert max(times) < 1


@pytest.mark.parametrize("sampling", ["uniform", "beta", "logit_normal"])
def test_times_have_the_distribution_they_are_named_after(sampling: TimeSampling) -> None:
    uniform = (torch.arange(20000) + 0.5) / 20000
    times = sample_times(uniform, sampling).sort().values
    assert times.min() >= 0
    assert times.max() < 1
    grid = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    found = torch.searchsorted(times, grid).double() / 20000
    cumulative = {
        "uniform": grid,
        "beta": 1 - (1 - grid / 0.999) ** 1.5,  # x = 1 - t / 0.999 is from Beta(1.5, 1), which is below x with x^1.5
        "logit_normal": 0.5 * (1 + torch.erf(torch.logit(grid) / math.sqrt(2))),
    }[sampling]
    torch.testing.assert_close(found, cumulative.double(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("sampling", ["uniform", "beta", "logit_normal"])
def test_the_ends_of_the_distribution_are_finite(sampling: TimeSampling) -> None:
    times = sample_times(torch.tensor([0.0, 1 - 2**-24]), sampling)
    assert times.isfinite().all()
    assert ((times >= 0) & (times <= 1)).all()


def make(**options: Any) -> FlowMatching:
    torch.manual_seed(0)
    policy = FlowMatching(**{"down_dims": [16, 32], "n_layers": 2, "hidden_dim": 32, **options})
    policy.build(make_spec())
    return policy


def test_noise_flows_to_actions_on_straight_lines() -> None:
    policy = make()
    actions, noise = torch.ones(3, 16, 2), torch.zeros(3, 16, 2)
    noisy, time_B, velocity = policy.corrupt(actions, noise, torch.tensor([0.0, 0.25, 0.5]))
    assert noisy[:, 0, 0].tolist() == [0.0, 0.25, 0.5]
    assert (time_B / TIME_SCALE).tolist() == [0.0, 0.25, 0.5]
    assert torch.equal(velocity, actions)


@pytest.mark.parametrize("solver, num_inference_steps", [("euler", 1), ("euler", 3), ("midpoint", 4)])
def test_who_predicts_the_actions_themselves_is_led_to_them(solver: Solver, num_inference_steps: int) -> None:
    policy = make(prediction_type="sample", solver=solver, num_inference_steps=num_inference_steps)
    actions, noise = torch.rand(3, 16, 2), torch.randn(3, 16, 2)
    assert torch.equal(policy.corrupt(actions, noise, torch.tensor([0.0, 0.25, 0.5]))[2], actions)
    asked: list[float] = []

    def answer(point: torch.Tensor, time_B: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        asked.append(float(time_B[0]) / TIME_SCALE)
        expected = torch.lerp(noise, actions, asked[-1])
        assert torch.allclose(point, expected, atol=1e-6), "points lie on the line from the noise to the actions"
        return actions

    policy.head.forward = answer  # type: ignore[method-assign]
    assert torch.allclose(policy.denoise(noise, torch.zeros(3, 1)), actions, atol=1e-6)
    assert max(asked) < 1


@pytest.mark.parametrize("sampling", ["uniform", "beta", "logit_normal"])
def test_every_distribution_of_times_trains(sampling: TimeSampling) -> None:
    policy = make(time_sampling=sampling)
    loss = policy(make_batch(policy))
    loss.total.backward()
    assert loss.total.isfinite()


def test_flows_may_use_any_normalisation() -> None:
    for mode in ("mean_std", "min_max", "identity"):
        assert make(normalization={"action": mode}).predict_action_chunk(make_batch(make())).isfinite().all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"solver": "heun"}, "solver 'heun' is unknown; one of euler, midpoint"),
        ({"time_sampling": "cosine"}, "one of uniform, beta, logit_normal"),
        ({"num_inference_steps": 0}, "at least 1"),
        ({"prediction_type": "epsilon"}, "prediction_type 'epsilon' is unknown; one of velocity, sample"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)
