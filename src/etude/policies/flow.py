"""Flow matching (Lipman et al. 2023; rectified flow, Liu et al. 2023): actions flow out of noise on straight lines.

Time 0 is noise, time 1 is data; between them x = (1 - t) noise + t data, which moves at the velocity data - noise.

Shape letters: B batch, H denoised actions, A action.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.policies.generative import GenerativeKeywords, GenerativeOptions, GenerativePolicy

Solver = Literal["euler", "midpoint"]
TimeSampling = Literal["uniform", "beta", "logit_normal"]
FlowPrediction = Literal["velocity", "sample"]
Velocity = Callable[[Tensor, Tensor], Tensor]
"""From a point (B, ...) and times (B,) to where it moves, (B, ...)."""

TIME_SCALE = 100.0
"""What times are multiplied by before they are embedded, so that they spread like the 100 steps of diffusion."""
_BETA_EXPONENT, _BETA_END = 1.5, 0.999


def integrate(velocity: Velocity, noise: Tensor, num_steps: int, solver: Solver = "euler") -> Tensor:
    """Follow the velocity from time 0 to time 1 in equal steps; the midpoint rule asks for it twice a step."""
    point, width = noise, 1 / num_steps

    def at(time: float) -> Tensor:
        return torch.full((noise.shape[0],), time, dtype=noise.dtype, device=noise.device)

    for i in range(num_steps):
        slope = velocity(point, at(i * width))
        if solver == "midpoint":
            slope = velocity(point + width / 2 * slope, at((i + 0.5) * width))
        point = point + width * slope
    return point


def sample_times(uniform_B: Tensor, sampling: TimeSampling) -> Tensor:
    """Turn uniform numbers into training times by the inverse of the distribution's cumulative function.

    uniform: all times alike. beta: 0.999 (1 - x) with x from Beta(1.5, 1), more often noisy, as in pi0 (2024).
    logit_normal: the logistic function of a normal number, more often halfway, as in Stable Diffusion 3 (2024).
    """
    if sampling == "beta":
        return _BETA_END * (1 - uniform_B ** (1 / _BETA_EXPONENT))
    if sampling == "logit_normal":
        # Half a unit of the last place away from 0 and 1, where the normal quantile is infinite.
        inner_B = uniform_B.clamp(2**-25, 1 - 2**-24)
        return torch.sigmoid(math.sqrt(2) * torch.erfinv(2 * inner_B - 1))
    return uniform_B


class FlowMatching(GenerativePolicy):
    """Turn noise into a sequence of actions along a learned flow, with a UNet or a DiT.

    The defaults are as large as Diffusion's (250 million parameters); `down_dims=[64, 128]` learns on a laptop.

    Args:
        horizon: Actions made together, the first for the oldest observation.
        n_obs_steps: Observations in a row that the policy sees.
        n_action_steps: Actions executed of each chunk.
        solver: euler or midpoint, which asks the network twice a step.
        num_inference_steps: Steps of the solver.
        time_sampling: Which times are trained most: uniform, beta (noisy ones) or logit_normal (those halfway).
        prediction_type: What the network predicts: velocity (as published) or sample (the actions, from which the
            velocity follows; it need not carry the noise through, and is learned in fewer steps).
        n_layers: Blocks of a transformer, DiT or MLP head.
        causal: Let an action of the transformer see no later one.
        keywords: Fields of `GenerativeOptions`: the head, execution and images.
    """

    def __init__(
        self,
        horizon: int = 16,
        n_obs_steps: int = 2,
        n_action_steps: int | None = 8,
        solver: Solver = "euler",
        num_inference_steps: int = 10,
        time_sampling: TimeSampling = "uniform",
        prediction_type: FlowPrediction = "velocity",
        n_layers: int = 6,
        causal: bool = False,
        **keywords: GenerativeKeywords,
    ) -> None:
        options = GenerativeOptions(n_layers=n_layers, causal=causal, **keywords)
        super().__init__(horizon, options, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps)
        self.solver, self.num_inference_steps, self.time_sampling = solver, num_inference_steps, time_sampling
        self.prediction_type = prediction_type
        for name, value, known in (
            ("solver", solver, Solver),
            ("time_sampling", time_sampling, TimeSampling),
            ("prediction_type", prediction_type, FlowPrediction),
        ):
            if value not in get_args(known):
                raise ConfigError(f"FlowMatching {name} {value!r} is unknown; one of {', '.join(get_args(known))}")
        if num_inference_steps < 1:
            raise ConfigError(f"FlowMatching num_inference_steps must be at least 1, got {num_inference_steps}")

    def corrupt(self, actions_BHA: Tensor, noise_BHA: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return points on the lines from noise to actions, the scaled times, and the velocities or actions there."""
        time_B = sample_times(uniform_B, self.time_sampling)
        noisy_BHA = torch.lerp(noise_BHA, actions_BHA, time_B.to(actions_BHA.dtype).view(-1, 1, 1))
        target_BHA = actions_BHA if self.prediction_type == "sample" else actions_BHA - noise_BHA
        return noisy_BHA, TIME_SCALE * time_B, target_BHA

    def denoise(self, noise_BHA: Tensor, condition: Tensor) -> Tensor:
        """Return the actions that the noise flows to, (B, H, A)."""

        def velocity(point_BHA: Tensor, time_B: Tensor) -> Tensor:
            out: Tensor = self.head(point_BHA, TIME_SCALE * time_B, condition)
            if self.prediction_type == "sample":
                # The rest of the line in the rest of the time; no solver asks at time 1.
                out = (out - point_BHA) / (1 - time_B).view(-1, 1, 1)
            return out

        return integrate(velocity, noise_BHA, self.num_inference_steps, self.solver)
