from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.policies.noise_schedule import (
    Prediction,
    Sampler,
    add_noise,
    ddim_step,
    ddpm_step,
    inference_steps,
    make_alpha_bars,
    make_betas,
    predicted_clean,
    sample,
    training_target,
)

PREDICTIONS: tuple[Prediction, ...] = ("epsilon", "sample", "v_prediction")


def test_squared_cosine_follows_its_published_formula() -> None:
    """alpha_bar(t) = f(t) / f(0), f(t) = cos^2((t / N + 0.008) / 1.008 * pi / 2); only the last step is capped."""
    f = [math.cos((t / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(101)]
    alpha_bars = make_alpha_bars("squaredcos_cap_v2", 100).tolist()
    assert alpha_bars[:99] == pytest.approx([value / f[0] for value in f[1:100]], rel=1e-9)
    assert alpha_bars[99] == pytest.approx(alpha_bars[98] * 0.001)
    assert max(make_betas("squaredcos_cap_v2", 100).tolist()) == 0.999


def test_linear_betas_leave_what_ddpm_says_they_leave() -> None:
    """With 1000 steps from 1e-4 to 0.02 the last alpha bar is 4.036e-5 (DDPM, section 4: L_T is almost nothing)."""
    betas = make_betas("linear", 1000)
    assert betas[0] == pytest.approx(1e-4)
    assert betas[-1] == pytest.approx(0.02)
    assert make_alpha_bars("linear", 1000)[-1].item() == pytest.approx(4.036e-5, rel=1e-3)


@pytest.mark.parametrize(
    "schedule, steps, left", [("linear", 100, "0.36"), ("linear", 1000, ""), ("squaredcos_cap_v2", 100, "")]
)
def test_a_schedule_that_leaves_much_of_the_signal_is_warned_of(
    schedule: Any, steps: int, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_alpha_bars(schedule, steps)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(left)
    assert not left or f"with {steps} steps ends with alpha bar at {left}, not near 0" in said[0]


@pytest.mark.parametrize("schedule", ["squaredcos_cap_v2", "linear"])
def test_noise_only_grows(schedule: Any) -> None:
    alpha_bars = make_alpha_bars(schedule, 100)
    assert alpha_bars.dtype == torch.float64
    assert ((alpha_bars > 0) & (alpha_bars < 1)).all()
    assert (alpha_bars.diff() < 0).all()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_perfect_prediction_gives_back_the_clean_signal(prediction: Prediction) -> None:
    torch.manual_seed(0)
    clean, noise = torch.randn(3, 5, 2, dtype=torch.float64), torch.randn(3, 5, 2, dtype=torch.float64)
    for alpha_bar in (0.9, 0.3, 0.01):
        levels_B = torch.full((3,), alpha_bar, dtype=torch.float64)
        noisy = add_noise(clean, noise, levels_B)
        target = training_target(clean, noise, levels_B, prediction)
        torch.testing.assert_close(predicted_clean(target, noisy, alpha_bar, prediction), clean)


def test_rows_have_noise_levels_of_their_own() -> None:
    clean, noise = torch.ones(2, 4, 3), -torch.ones(2, 4, 3)
    noisy = add_noise(clean, noise, torch.tensor([1.0, 0.0]))
    assert torch.equal(noisy[0], clean[0])
    assert torch.equal(noisy[1], noise[1])


@pytest.mark.parametrize("levels", [(0.5, 0.6), (0.01, 0.7), (0.2, 0.2001)])
def test_a_ddpm_step_is_the_posterior_of_bayes(levels: tuple[float, float]) -> None:
    """Of the signal at the lower level, given x0 and the noisy one: two Gaussians multiplied, by hand."""
    low, high = levels
    clean, noisy = 0.7, -0.4
    forward = low / high  # noisy = sqrt(forward) z + sqrt(1 - forward) e, with z ~ N(sqrt(high) clean, 1 - high)
    precision = 1 / (1 - high) + forward / (1 - forward)
    mean = (math.sqrt(high) * clean / (1 - high) + math.sqrt(forward) * noisy / (1 - forward)) / precision
    tensors = [torch.tensor([value], dtype=torch.float64) for value in (noisy, clean, 1.0)]
    without = ddpm_step(tensors[0], tensors[1], low, high, None)
    with_noise = ddpm_step(tensors[0], tensors[1], low, high, tensors[2])
    assert without.item() == pytest.approx(mean)
    assert (with_noise - without).item() == pytest.approx(math.sqrt(1 / precision))


def test_a_ddim_step_keeps_the_noise() -> None:
    torch.manual_seed(0)
    clean, noise = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    noisy = math.sqrt(0.2) * clean + math.sqrt(0.8) * noise
    expected = math.sqrt(0.9) * clean + math.sqrt(0.1) * noise
    torch.testing.assert_close(ddim_step(noisy, clean, 0.2, 0.9), expected)


@pytest.mark.parametrize("total, wanted", [(100, 100), (100, 10), (100, 7), (50, 3), (1000, 1), (3, 2)])
def test_visited_steps_start_at_the_noisiest(total: int, wanted: int) -> None:
    steps = inference_steps(total, wanted)
    assert len(steps) == wanted
    assert steps[0] == total - 1
    assert all(a > b >= 0 for a, b in pairwise(steps))
    gaps = {a - b for a, b in pairwise(steps)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    if total == wanted:
        assert steps == list(range(total - 1, -1, -1))


def test_the_steps_of_diffusers_are_multiples_from_the_cleanest_on() -> None:
    assert inference_steps(100, 5, like_diffusers=True) == [80, 60, 40, 20, 0]
    assert inference_steps(20, 6, like_diffusers=True) == [15, 12, 9, 6, 3, 0]


@pytest.mark.parametrize("wanted", [0, 101])
def test_more_steps_than_trained_are_refused(wanted: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and num_train_timesteps \\(100\\)"):
        inference_steps(100, wanted)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match="'cosine' is unknown"):
        make_betas("cosine", 10)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        make_betas("linear", 0)


def reference_sampler(
    sampler: Sampler, start: np.ndarray, noises: list[np.ndarray], steps: list[int], clip: float
) -> Any:
    """DDPM's algorithm 2 and DDIM's equation 12 in NumPy, with a made-up epsilon network."""
    f = [math.cos((t / 20 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(21)]
    betas = np.array([min(1 - f[t + 1] / f[t], 0.999) for t in range(20)])
    bars = np.cumprod(1 - betas)
    x = start
    for i, t in enumerate(steps):
        bar, later = bars[t], bars[steps[i + 1]] if i + 1 < len(steps) else 1.0
        epsilon = np.tanh(x) * (0.5 + t / 40)
        x0 = np.clip((x - np.sqrt(1 - bar) * epsilon) / np.sqrt(bar), -clip, clip)
        if sampler == "ddim":
            epsilon = (x - np.sqrt(bar) * x0) / np.sqrt(1 - bar)
            x = np.sqrt(later) * x0 + np.sqrt(1 - later) * epsilon
            continue
        beta = 1 - bar / later
        mean = np.sqrt(later) * beta / (1 - bar) * x0 + np.sqrt(1 - beta) * (1 - later) / (1 - bar) * x
        x = mean + (np.sqrt((1 - later) / (1 - bar) * beta) * noises[i] if i + 1 < len(steps) else 0)
    return x


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
@pytest.mark.parametrize("wanted", [20, 6])
def test_sampling_agrees_with_a_plain_reference(sampler: Sampler, wanted: int) -> None:
    torch.manual_seed(3)
    start = torch.randn(2, 4, 3, dtype=torch.float64)
    noises = [torch.randn_like(start).numpy() for _ in range(20)]
    steps = inference_steps(20, wanted)
    expected = reference_sampler(sampler, start.numpy(), noises, steps, 1.5)

    def network(noisy: Tensor, step_B: Tensor) -> Tensor:
        return noisy.tanh() * (0.5 + step_B.double().view(-1, 1, 1) / 40)

    torch.manual_seed(3)
    again = torch.randn_like(start)
    table = make_alpha_bars("squaredcos_cap_v2", 20)
    found = sample(network, again, table, num_inference_steps=wanted, sampler=sampler, clip_range=1.5)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-12)


MEAN, STD = 0.6, 0.3


def gaussian_network(table_N: Tensor, prediction: Prediction) -> Any:
    """What the best network would say if the data were N(MEAN, STD^2)."""

    def network(noisy: Tensor, step_B: Tensor) -> Tensor:
        bar = table_N[step_B].view(-1, *[1] * (noisy.dim() - 1))
        clean = MEAN + bar.sqrt() * STD**2 / (bar * STD**2 + 1 - bar) * (noisy - bar.sqrt() * MEAN)
        noise = (noisy - bar.sqrt() * clean) / (1 - bar).sqrt()
        return {"epsilon": noise, "sample": clean, "v_prediction": bar.sqrt() * noise - (1 - bar).sqrt() * clean}[
            prediction
        ]

    return network


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_the_samplers_recover_a_gaussian_from_its_score(prediction: Prediction, sampler: Sampler) -> None:
    """With finite steps both come out a little narrow, the less so the more steps there are."""
    start = torch.randn(8000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = (start - start.mean()) / start.std()
    misses = []
    for steps in (25, 100, 300):
        torch.manual_seed(0)
        table = make_alpha_bars("squaredcos_cap_v2", steps)
        network = gaussian_network(table, prediction)
        found = sample(network, start, table, num_inference_steps=steps, sampler=sampler, prediction=prediction)
        assert found.mean().item() == pytest.approx(MEAN, abs=0.01)
        misses.append(abs(found.std().item() / STD - 1))
    assert misses[0] > misses[1] > misses[2]
    assert misses[1] < 0.06
    assert misses[2] < 0.03


def test_clipping_holds() -> None:
    def silent(noisy: Tensor, _: Tensor) -> Tensor:
        return torch.zeros_like(noisy)

    table = make_alpha_bars("squaredcos_cap_v2", 100)
    samplers: tuple[Sampler, ...] = ("ddpm", "ddim")
    for sampler in samplers:
        found = sample(silent, torch.randn(50, 2), table, num_inference_steps=10, sampler=sampler, clip_range=0.5)
        assert found.abs().max() == 0.5


def test_ddim_draws_nothing_and_ddpm_draws_from_the_global_generator() -> None:
    table, start = make_alpha_bars("squaredcos_cap_v2", 100), torch.ones(4, 2)
    network = gaussian_network(table.float(), "epsilon")
    found = {}
    for sampler in ("ddpm", "ddim"):
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            draws.append(sample(network, start, table, num_inference_steps=10, sampler=sampler))  # type: ignore[arg-type]
            assert torch.equal(before, torch.get_rng_state()) == (sampler == "ddim")
        found[sampler] = [torch.equal(draws[0], draws[1]), torch.equal(draws[0], draws[2])]
    assert found == {"ddpm": [True, False], "ddim": [True, True]}
