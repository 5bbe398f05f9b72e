"""Diffusion as functions on tensors: noise schedules, training targets, and the DDPM and DDIM samplers.

The clean signal x and noise e mix as sqrt(a) x + sqrt(1 - a) e, where a ("alpha bar") falls from almost 1 to almost 0
over N steps. Ho et al. 2020 (DDPM), Song et al. 2021 (DDIM), Nichol and Dhariwal 2021 (squared cosine),
Salimans and Ho 2022 (v), Lin et al. 2024 (which steps to visit).

Shape letters: B batch, N training timesteps. Signals have any shape that starts with B.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from etude.errors import ConfigError

BetaSchedule = Literal["squaredcos_cap_v2", "linear"]
Prediction = Literal["epsilon", "sample", "v_prediction"]
Sampler = Literal["ddpm", "ddim"]
Denoiser = Callable[[Tensor, Tensor], Tensor]
"""From a noisy signal (B, ...) and timesteps (B,) to what the network predicts (B, ...)."""

_COSINE_OFFSET = 0.008
_BETA_CAP = 0.999
_MOST_SIGNAL_LEFT = 0.01
"""Last alpha bar from which on sampling, which starts from pure noise, starts where training never was."""

log = logging.getLogger("etude")


def make_betas(schedule: BetaSchedule, num_steps: int, start: float = 1e-4, end: float = 0.02) -> Tensor:
    """Return how much of the variance each step replaces by noise, (N,) in float64.

    `start` and `end` are for the linear schedule, whose published values belong to 1000 steps.
    """
    if num_steps < 1:
        raise ConfigError(f"num_train_timesteps must be at least 1, got {num_steps}")
    if schedule == "linear":
        return torch.linspace(start, end, num_steps, dtype=torch.float64)
    if schedule != "squaredcos_cap_v2":
        raise ConfigError(f"beta schedule {schedule!r} is unknown; one of squaredcos_cap_v2, linear")
    edges = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    kept = torch.cos((edges + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * math.pi / 2).square()
    return (1 - kept[1:] / kept[:-1]).clamp(max=_BETA_CAP)


def make_alpha_bars(
    schedule: BetaSchedule, num_steps: int, start: float = 1e-4, end: float = 0.02, *, like_diffusers: bool = False
) -> Tensor:
    """Return the share of the clean signal's variance that is left after each step, (N,) in float64.

    Those of diffusers are computed in float32, which is off by 1e-5 where little is left.
    """
    betas_N = make_betas(schedule, num_steps, start, end)
    alpha_bars_N = (1 - (betas_N.float() if like_diffusers else betas_N)).cumprod(0).double()
    left = float(alpha_bars_N[-1])
    if left > _MOST_SIGNAL_LEFT:
        log.warning(
            "the %s noise schedule with %d steps ends with alpha bar at %.2g, not near 0, but sampling starts from "
            "pure noise: choose squaredcos_cap_v2, or 1000 steps",
            schedule, num_steps, left,
        )  # fmt: skip
    return alpha_bars_N


def add_noise(clean: Tensor, noise: Tensor, alpha_bar_B: Tensor) -> Tensor:
    """Return the noisy signal, each row at its own noise level."""
    alpha_bar = _rows(alpha_bar_B, clean)
    return alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise


def training_target(clean: Tensor, noise: Tensor, alpha_bar_B: Tensor, prediction: Prediction) -> Tensor:
    """Return what the network should say of a noisy signal: the noise, the clean signal, or the velocity."""
    if prediction == "epsilon":
        return noise
    if prediction == "sample":
        return clean
    alpha_bar = _rows(alpha_bar_B, clean)
    return alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * clean


def predicted_clean(output: Tensor, noisy: Tensor, alpha_bar: float, prediction: Prediction) -> Tensor:
    """Return the clean signal that the network's output stands for."""
    if prediction == "sample":
        return output
    if prediction == "epsilon":
        return (noisy - math.sqrt(1 - alpha_bar) * output) / math.sqrt(alpha_bar)
    return math.sqrt(alpha_bar) * noisy - math.sqrt(1 - alpha_bar) * output


def ddpm_step(noisy: Tensor, clean: Tensor, alpha_bar: float, alpha_bar_next: float, noise: Tensor | None) -> Tensor:
    """Draw the signal at a lower noise level from its posterior given the noisy and the clean one (DDPM, eq. 6, 7).

    The levels need not be neighbours. Without noise, return the posterior's mean.
    """
    step_alpha = alpha_bar / alpha_bar_next
    of_clean = math.sqrt(alpha_bar_next) * (1 - step_alpha) / (1 - alpha_bar)
    of_noisy = math.sqrt(step_alpha) * (1 - alpha_bar_next) / (1 - alpha_bar)
    mean = of_clean * clean + of_noisy * noisy
    if noise is None:
        return mean
    return mean + math.sqrt((1 - alpha_bar_next) / (1 - alpha_bar) * (1 - step_alpha)) * noise


def ddim_step(
    noisy: Tensor, clean: Tensor, alpha_bar: float, alpha_bar_next: float, unclipped: Tensor | None = None
) -> Tensor:
    """Move along the deterministic path (DDIM with eta 0) to a lower noise level.

    The noise is taken from the noisy and the clean signal, so that clipping the clean one keeps the three consistent.
    Given the `unclipped` estimate of the clean signal, the noise is taken from that one, as diffusers does.
    """
    estimate = clean if unclipped is None else unclipped
    noise = (noisy - math.sqrt(alpha_bar) * estimate) / math.sqrt(1 - alpha_bar)
    return math.sqrt(alpha_bar_next) * clean + math.sqrt(1 - alpha_bar_next) * noise


def inference_steps(num_steps: int, num_inference_steps: int, *, like_diffusers: bool = False) -> list[int]:
    """Return the timesteps to visit, evenly spaced and falling, the noisiest first.

    The first is always the last training step, since sampling starts from pure noise; steps that start lower treat
    pure noise as if it still held signal. Those of diffusers do: they are multiples of a whole number, from 0 on.
    """
    if not 1 <= num_inference_steps <= num_steps:
        raise ConfigError(
            f"num_inference_steps must be between 1 and num_train_timesteps ({num_steps}), got {num_inference_steps}"
        )
    if like_diffusers:
        return [i * (num_steps // num_inference_steps) for i in reversed(range(num_inference_steps))]
    return [round(num_steps * (1 - i / num_inference_steps)) - 1 for i in range(num_inference_steps)]


def sample(
    denoise: Denoiser,
    noise: Tensor,
    alpha_bars: Sequence[float] | Tensor,
    *,
    num_inference_steps: int,
    sampler: Sampler = "ddpm",
    prediction: Prediction = "epsilon",
    clip_range: float | None = None,
    like_diffusers: bool = False,
) -> Tensor:
    """Turn noise (B, ...) into a clean signal by undoing the noise step by step.

    Args:
        denoise: The network.
        noise: Where to start; standard normal.
        alpha_bars: The schedule the network was trained with, N numbers.
        num_inference_steps: How many of its steps to visit.
        sampler: ddpm draws fresh noise at each step, from the global generator; ddim draws none.
        prediction: What the network predicts.
        clip_range: Keep each estimate of the clean signal within plus and minus this much.
        like_diffusers: Visit the steps that diffusers visits, and let ddim keep the noise as it was before clipping.
    """
    steps = inference_steps(len(alpha_bars), num_inference_steps, like_diffusers=like_diffusers)
    levels = [float(alpha_bars[step]) for step in steps] + [1.0]
    noisy = noise
    for i, step in enumerate(steps):
        output = denoise(noisy, torch.full((noisy.shape[0],), step, device=noisy.device))
        clean = unclipped = predicted_clean(output, noisy, levels[i], prediction)
        if clip_range is not None:
            clean = clean.clamp(-clip_range, clip_range)
        if i == len(steps) - 1:
            return clean
        if sampler == "ddim":
            noisy = ddim_step(noisy, clean, levels[i], levels[i + 1], unclipped if like_diffusers else None)
        else:
            noisy = ddpm_step(noisy, clean, levels[i], levels[i + 1], torch.randn_like(noisy))
    return noisy


def _rows(value_B: Tensor, like: Tensor) -> Tensor:
    return value_B.view(-1, *[1] * (like.dim() - 1))
