"""What policies share that make actions out of noise: conditioning, network heads, windows, and the masked loss.

Shape letters: B batch, H denoised actions, A action, T observation steps, K draws per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.policies.base import PolicyModule, masked_loss
from etude.policies.denoising_mlp import DenoisingMLP
from etude.policies.dit import DenoisingTransformer, DiT
from etude.policies.observation import ObservationEncoder
from etude.policies.options import SharedOptions
from etude.policies.unet1d import ConditionalUnet1D
from etude.signatures.nested import ParametersOf
from etude.types import DataSpec, Loss

Head = Literal["unet", "transformer", "dit", "mlp"]
EVALUATION_DRAWS = 4
"""Noise levels at which each sample's loss is measured in evaluation."""
PUBLISHED_DOWN_DIMS = (512, 1024, 2048)


@dataclass(frozen=True)
class GenerativeOptions(SharedOptions):
    """Beside what all policies share: the network that denoises, and how observations condition it."""

    head: Head = "unet"
    """Network that denoises: unet, transformer, dit, or mlp, which learns states fastest on a CPU."""
    down_dims: list[int] | None = None
    """Channels of the UNet at each level; None is 512, 1024, 2048."""
    kernel_size: int = 5
    """Width of the UNet's convolutions in time."""
    n_groups: int = 8
    """Groups of the UNet's normalisations."""
    step_embed_dim: int = 128
    """Width of the UNet's embedding of the noise level."""
    film_scale: bool = True
    """Let the condition scale the UNet's channels as well as shift them."""
    n_layers: int = 8
    """Blocks of a transformer, DiT or MLP head."""
    n_heads: int = 4
    """Attention heads of a transformer or DiT head."""
    hidden_dim: int = 256
    """Width of a transformer, DiT or MLP head."""
    dropout: float = 0.0
    """Dropout of a transformer, DiT or MLP head."""
    causal: bool = True
    """Let an action of the transformer see no later one."""
    noise_scale: float = 1.0
    """Deviation of the noise that actions are made from: 1 as in training; less keeps nearer to what is usual, and with
    0 the same observation always gives the same actions."""
    do_mask_loss: bool = True
    """Leave padded actions out of the loss."""
    keypoints: int = 32
    """Points located in each image."""
    image_dim: int | None = 64
    """Width of a layer over them; None leaves it out."""
    task_dim: int = 32
    """Width of the embedding of a task."""

    def make_head(self, action_dim: int, encoder: ObservationEncoder, horizon: int, n_obs_steps: int) -> nn.Module:
        """Return the network for actions of this width and conditions of this encoder."""
        if self.head == "unet":
            down_dims = list(PUBLISHED_DOWN_DIMS if self.down_dims is None else self.down_dims)
            unet = ConditionalUnet1D(
                action_dim, encoder.out_dim, down_dims=down_dims, kernel_size=self.kernel_size,
                groups=self.n_groups, step_embed_dim=self.step_embed_dim, film_scale=self.film_scale,
            )  # fmt: skip
            unet.check_horizon(horizon)
            return unet
        sizes: dict[str, Any] = {"n_layers": self.n_layers, "hidden_dim": self.hidden_dim, "dropout": self.dropout}
        if self.head == "mlp":
            return DenoisingMLP(action_dim, encoder.out_dim, horizon, **sizes)
        sizes["n_heads"] = self.n_heads
        if self.head == "dit":
            return DiT(action_dim, encoder.out_dim, horizon, **sizes)
        if self.head != "transformer":
            raise ConfigError(f"head {self.head!r} is unknown; one of unet, transformer, dit, mlp")
        width = encoder.step_dim + encoder.context_dim
        return DenoisingTransformer(action_dim, width, horizon, n_obs_steps, causal=self.causal, **sizes)


GenerativeKeywords = Annotated[Any, ParametersOf("etude.policies.generative:GenerativeOptions")]
"""Says that `**keywords` are fields of `GenerativeOptions`."""


class GenerativePolicy(PolicyModule):
    """A policy that denoises `denoised_steps` actions at once, the first of them for the oldest observation.

    A subclass defines `corrupt(actions, noise, uniform)`, which says what the network sees and should answer, and
    `denoise(noise, condition)`. The weights' average that both families like is the trainer's (`ema_decay`).
    """

    default_normalization: ClassVar[Mapping[str, str]] = {
        "state": "min_max", "environment": "min_max", "action": "min_max"
    }  # fmt: skip

    def __init__(
        self,
        horizon: int,
        options: GenerativeOptions,
        *,
        n_obs_steps: int,
        n_action_steps: int | None,
    ) -> None:
        if horizon < n_obs_steps:
            raise ConfigError(
                f"{type(self).__name__} denoises {horizon} actions from the oldest of {n_obs_steps} observations on, "
                f"which leaves none for the future; set horizon above n_obs_steps"
            )
        if not options.noise_scale >= 0:
            raise ConfigError(f"{type(self).__name__} noise_scale must be 0 or more, got {options.noise_scale}")
        super().__init__(
            horizon - n_obs_steps + 1, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps, **options.execution
        )
        self.denoised_steps = horizon
        """Actions that are denoised together; `self.horizon` of them lie in the present and the future."""
        self.options, self.do_mask_loss = options, options.do_mask_loss

    @property
    def action_delta_indices(self) -> list[int]:
        """Distances in frames of the actions in a batch, from the oldest observation on."""
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.denoised_steps))

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    def corrupt(self, actions_BHA: Tensor, noise_BHA: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the noisy actions, the time the network is told, and what it should answer.

        `uniform_B` in [0, 1) chooses the noise level of each row.
        """
        raise NotImplementedError(f"{type(self).__name__} must define corrupt(actions, noise, uniform)")

    def denoise(self, noise_BHA: Tensor, condition: Tensor) -> Tensor:
        """Return the actions that the noise becomes, (B, H, A)."""
        raise NotImplementedError(f"{type(self).__name__} must define denoise(noise, condition)")

    # ---- shared ------------------------------------------------------------------------------------------------------

    def make_layers(self, spec: DataSpec) -> None:
        """Create the encoder of observations and the network that denoises."""
        options = self.options
        images = replace(options.images, fetch_weights=not self.is_restored)
        self.encoder = ObservationEncoder(
            spec, self.n_obs_steps, images=images, keypoints=options.keypoints, image_dim=options.image_dim,
            task_dim=options.task_dim,
        )  # fmt: skip
        self.head = options.make_head(self.action_dim, self.encoder, self.denoised_steps, self.n_obs_steps)

    def condition(self, batch: Mapping[str, Any]) -> Tensor:
        """Return what the network is told of normalised observations: one vector, or tokens for a transformer."""
        if not isinstance(self.head, DenoisingTransformer):
            vector: Tensor = self.encoder(batch)
            return vector
        steps, context = self.encoder.steps(batch), self.encoder.context(batch)
        if context is None:
            return steps
        return torch.cat([steps, context.unsqueeze(1).expand(-1, steps.shape[1], -1)], dim=2)

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        """Return the squared error of the network's answer, over the real actions.

        In training each sample meets one noise level; in evaluation several, each in its own part of the range, so
        that two checkpoints differ by what they learned and not by their luck.
        """
        self.require_built()
        normalised = self.normalizer.normalize(batch)
        actions_BHA, valid_BH = self.targets(normalised)
        if self.do_mask_loss:
            actions_BHA = repeat_edges(actions_BHA, valid_BH)
        else:
            valid_BH = torch.ones_like(valid_BH)
        condition = self.condition(normalised)
        draws = 1 if self.training else EVALUATION_DRAWS
        uniform = even_draws(draws, actions_BHA.shape[0], actions_BHA.device)
        if draws > 1:
            actions_BHA = actions_BHA.repeat(draws, 1, 1)
            condition = condition.repeat(draws, *[1] * (condition.dim() - 1))
        noisy, time, target = self.corrupt(actions_BHA, torch.randn_like(actions_BHA), uniform)
        errors = (self.head(noisy, time, condition) - target).square()
        return masked_loss(errors.unflatten(0, (draws, -1)).mean(0), valid_BH)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return normalised actions from now on, drawn with the global generator."""
        condition = self.condition(batch)
        noise = torch.randn(
            condition.shape[0], self.denoised_steps, self.action_dim, dtype=condition.dtype, device=condition.device
        )
        return self._act_on(noise, condition)

    def sample_from_noise(self, batch: Mapping[str, Any], noise: Tensor) -> Tensor:
        """Return the normalised actions that this noise becomes; it is standard normal, and scaled here."""
        return self._act_on(noise, self.condition(batch))

    def _act_on(self, noise_BHA: Tensor, condition: Tensor) -> Tensor:
        return self.denoise(self.options.noise_scale * noise_BHA, condition)[:, self.n_obs_steps - 1 :]

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the noise that one chunk is made from."""
        return (self.denoised_steps, self.action_dim)


def even_draws(draws: int, batch: int, device: torch.device) -> Tensor:
    """Return numbers in [0, 1), (K * B,), one in each of K * B equal parts; the draws of a sample lie in K of them.

    Each number alone is uniform. Spreading them evenly makes the mean loss of a batch less a matter of luck.
    """
    places_KB = torch.stack([torch.randperm(batch, device=device) for _ in range(draws)])
    places_KB = places_KB + batch * torch.arange(draws, device=device).unsqueeze(1)
    jitter_KB = torch.rand(draws, batch, device=device)
    # Rounding up to 1.0 would name a level that is not there.
    return ((places_KB + jitter_KB) / (draws * batch)).flatten().clamp(max=1 - 2**-24)


def repeat_edges(actions_BHA: Tensor, valid_BH: Tensor) -> Tensor:
    """Put the nearest real action wherever an action is padding, so that nothing depends on what padding holds."""
    steps = actions_BHA.shape[1]
    first_B1 = valid_BH.argmax(1, keepdim=True)
    last_B1 = steps - 1 - valid_BH.flip(1).argmax(1, keepdim=True)
    nearest_BH = torch.arange(steps, device=actions_BHA.device).expand_as(valid_BH).clamp(first_B1, last_B1)
    return actions_BHA.gather(1, nearest_BH.unsqueeze(2).expand_as(actions_BHA))
