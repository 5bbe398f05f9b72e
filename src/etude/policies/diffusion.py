"""Diffusion Policy (Chi et al. 2023): actions are denoised step by step, given what was observed.

Shape letters: B batch, H denoised actions, A action, N training timesteps.
"""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from etude.errors import ConfigError
from etude.policies import noise_schedule
from etude.policies.generative import GenerativeKeywords, GenerativeOptions, GenerativePolicy
from etude.policies.noise_schedule import BetaSchedule, Prediction, Sampler
from etude.types import DataSpec


class Diffusion(GenerativePolicy):
    """Denoise a sequence of actions with a UNet or a transformer, as published.

    The defaults are the published ones (250 million parameters); `down_dims=[64, 128]` learns on a laptop.

    Args:
        horizon: Actions denoised together, the first for the oldest observation.
        n_obs_steps: Observations in a row that the policy sees.
        n_action_steps: Actions executed of each chunk.
        num_train_timesteps: Noise levels.
        beta_schedule: squaredcos_cap_v2 or linear.
        prediction_type: What the network predicts: epsilon (the noise, as published), sample (the actions, learned in
            far fewer steps) or v_prediction.
        sampler: ddpm or ddim.
        num_inference_steps: Noise levels visited to make actions; None is all of them.
        clip_sample: Keep estimates of the actions within the range of the data while denoising.
        clip_sample_range: That range, in normalised units; at least 1.
        like_diffusers: Visit the noise levels and clip as the diffusers library does, and LeRobot with it; needed to
            exchange policies with LeRobot that sample with ddim or in fewer steps than they were trained with.
        dropout: Dropout of a transformer, DiT or MLP head.
        keywords: Fields of `GenerativeOptions`: the head, execution and images.
    """

    alpha_bars_N: Tensor

    def __init__(
        self,
        horizon: int = 16,
        n_obs_steps: int = 2,
        n_action_steps: int | None = 8,
        num_train_timesteps: int = 100,
        beta_schedule: BetaSchedule = "squaredcos_cap_v2",
        prediction_type: Prediction = "epsilon",
        sampler: Sampler = "ddpm",
        num_inference_steps: int | None = None,
        clip_sample: bool = True,
        clip_sample_range: float = 1.0,
        like_diffusers: bool = False,
        dropout: float = 0.01,
        **keywords: GenerativeKeywords,
    ) -> None:
        options = GenerativeOptions(dropout=dropout, **keywords)
        super().__init__(horizon, options, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps)
        self.prediction_type, self.sampler = prediction_type, sampler
        self.num_train_timesteps, self.beta_schedule = num_train_timesteps, beta_schedule
        self.num_inference_steps = num_train_timesteps if num_inference_steps is None else num_inference_steps
        self.clip_range = clip_sample_range if clip_sample else None
        self.like_diffusers = like_diffusers
        self._check_schedule()

    def _check_schedule(self) -> None:
        for name, value, known in (
            ("sampler", self.sampler, Sampler),
            ("prediction_type", self.prediction_type, Prediction),
            ("beta_schedule", self.beta_schedule, BetaSchedule),
        ):
            if value not in get_args(known):
                raise ConfigError(f"Diffusion {name} {value!r} is unknown; one of {', '.join(get_args(known))}")
        if self.sampler == "ddpm" and self.options.noise_scale != 1:
            raise ConfigError("Diffusion noise_scale is for the sampler ddim; ddpm draws new noise on the way")
        noise_schedule.inference_steps(self.num_train_timesteps, self.num_inference_steps)
        if self.clip_range is not None and self.clip_range < 1:
            raise ConfigError(
                f"Diffusion clip_sample_range {self.clip_range} cuts off actions of the data, which reach 1 when "
                "normalised; set it to 1 or more"
            )

    @property
    def clips_actions(self) -> bool:
        """Whether samples are clipped, which the action's normalisation must then fit."""
        return self.clip_range is not None

    def make_layers(self, spec: DataSpec) -> None:
        """Create the encoder of observations, the network that denoises, and the table of noise levels."""
        super().make_layers(spec)
        table = noise_schedule.make_alpha_bars(
            self.beta_schedule, self.num_train_timesteps, like_diffusers=self.like_diffusers
        )
        self.register_buffer("alpha_bars_N", table.float(), persistent=False)
        # As plain numbers for the sampler, whose steps are the same for the whole batch.
        self.alpha_bars: list[float] = table.tolist()

    def corrupt(self, actions_BHA: Tensor, noise_BHA: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the noisy actions, the timestep, and what the network should predict."""
        step_B = (uniform_B * self.num_train_timesteps).long()
        alpha_bar_B = self.alpha_bars_N[step_B]
        noisy_BHA = noise_schedule.add_noise(actions_BHA, noise_BHA, alpha_bar_B)
        return noisy_BHA, step_B, noise_schedule.training_target(
            actions_BHA, noise_BHA, alpha_bar_B, self.prediction_type
        )  # fmt: skip

    def denoise(self, noise_BHA: Tensor, condition: Tensor) -> Tensor:
        """Return the actions that the noise becomes, (B, H, A)."""

        def predict(noisy_BHA: Tensor, step_B: Tensor) -> Tensor:
            out: Tensor = self.head(noisy_BHA, step_B, condition)
            return out

        return noise_schedule.sample(
            predict, noise_BHA, self.alpha_bars, num_inference_steps=self.num_inference_steps,
            sampler=self.sampler, prediction=self.prediction_type, clip_range=self.clip_range,
            like_diffusers=self.like_diffusers,
        )  # fmt: skip
