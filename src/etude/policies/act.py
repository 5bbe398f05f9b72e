"""Action Chunking with Transformers: Zhao et al. 2023, Learning Fine-Grained Bimanual Manipulation.

Shape letters: B batch, T tokens, D width, H actions in a chunk, A action, L latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.errors import ConfigError
from etude.policies.base import PolicyModule, masked_loss
from etude.policies.observation import Inputs, encode_cameras, make_image_encoder
from etude.policies.options import SharedKeywords, SharedOptions
from etude.policies.transformer import DecoderLayer, EncoderLayer, sinusoids, sinusoids_2d
from etude.types import DataSpec, Loss


class ACT(PolicyModule):
    """Predict a chunk of actions with a transformer that is trained as a conditional variational autoencoder.

    The defaults are the published sizes. For states on a CPU, `chunk_size=16, n_action_steps=8, dim_model=64,
    n_heads=4, dim_feedforward=256, n_encoder_layers=1, n_vae_encoder_layers=1, dropout=0` at a learning rate of 2e-3
    learns Meta-World's pick-place from 50 demonstrations in 800 steps, 20 seconds on one core.

    Args:
        chunk_size: Actions in a chunk.
        n_action_steps: Actions executed of each chunk; None is all of them.
        n_obs_steps: Observations in a row that the policy sees.
        dim_model: Width of the tokens.
        n_heads: Attention heads.
        dim_feedforward: Width inside the feed-forward layers.
        n_encoder_layers: Layers that read the observation.
        n_decoder_layers: Layers that write the chunk; the authors' code uses one.
        n_vae_encoder_layers: Layers that read the demonstrated chunk in training.
        latent_dim: Size of the latent that stands for the style of a demonstration.
        use_vae: Whether to train with the latent; without it the policy is a plain transformer.
        kl_weight: Weight of the divergence of the latent from a standard normal.
        dropout: Probability of dropping, everywhere in the transformer.
        activation: relu or gelu.
        pre_norm: Normalise before each layer's step rather than after it.
        keywords: Fields of `SharedOptions`: how chunks are executed and how images are read.
    """

    def __init__(
        self,
        chunk_size: int = 100,
        n_action_steps: int | None = None,
        n_obs_steps: int = 1,
        dim_model: int = 512,
        n_heads: int = 8,
        dim_feedforward: int = 3200,
        n_encoder_layers: int = 4,
        n_decoder_layers: int = 1,
        n_vae_encoder_layers: int = 4,
        latent_dim: int = 32,
        use_vae: bool = True,
        kl_weight: float = 10.0,
        dropout: float = 0.1,
        activation: str = "relu",
        pre_norm: bool = False,
        **keywords: SharedKeywords,
    ) -> None:
        shared = SharedOptions(**keywords)
        super().__init__(chunk_size, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps, **shared.execution)
        if min(n_encoder_layers, n_decoder_layers, n_vae_encoder_layers) < 1 or dim_model % 4:
            raise ConfigError("ACT needs at least one layer of each kind, and a dim_model that is a multiple of 4")
        self.dim_model, self.latent_dim, self.use_vae, self.kl_weight = dim_model, latent_dim, use_vae, kl_weight
        self.depths = n_encoder_layers, n_decoder_layers, n_vae_encoder_layers
        self.layer_sizes = dim_model, n_heads, dim_feedforward, dropout, activation, pre_norm
        self.images = shared.images

    def make_layers(self, spec: DataSpec) -> None:
        """Create the two encoders and the decoder for the features of a dataset."""
        width, (encoder_depth, decoder_depth, vae_depth) = self.dim_model, self.depths
        self.inputs = Inputs(spec, self.n_obs_steps)
        final_norm = nn.LayerNorm(width) if self.layer_sizes[-1] else nn.Identity()
        if self.use_vae:
            self.vae = LatentEncoder(self, vae_depth)
        self.tokens = ObservationTokens(self)
        self.encoder = nn.ModuleList([EncoderLayer(*self.layer_sizes) for _ in range(encoder_depth)])
        self.encoder_norm = final_norm
        self.decoder = nn.ModuleList([DecoderLayer(*self.layer_sizes) for _ in range(decoder_depth)])
        self.decoder_norm = nn.LayerNorm(width)
        self.query_positions = nn.Parameter(torch.randn(self.horizon, 1, width))
        self.action_head = nn.Linear(width, self.action_dim)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        """Return the L1 error of the chunk, and in training the divergence of the latent.

        In evaluation the latent is zero, as it is on the robot.
        """
        batch = self.normalizer.normalize(batch)
        actions_BHA, valid_BH = self.targets(batch)
        if not (self.use_vae and self.training):
            errors_BHA = functional.l1_loss(self.sample_actions(batch), actions_BHA, reduction="none")
            return masked_loss(errors_BHA, valid_BH)
        mean_BL, log_variance_BL = self.vae(batch, actions_BHA, valid_BH)
        latent_BL = mean_BL + (log_variance_BL / 2).exp() * torch.randn_like(mean_BL)
        errors_BHA = functional.l1_loss(self.decode(batch, latent_BL), actions_BHA, reduction="none")
        kl_B = 0.5 * (mean_BL.square() + log_variance_BL.exp() - 1 - log_variance_BL).sum(1)
        with torch.no_grad():
            l1 = (errors_BHA.mean(-1) * valid_BH).sum() / valid_BH.sum()
            metrics = {"l1": l1, "kl": kl_B.mean()}
        return masked_loss(errors_BHA, valid_BH, self.kl_weight * kl_B, metrics)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the chunk for the most likely latent, zero, (B, H, A)."""
        return self.decode(batch, None)

    def decode(self, batch: Mapping[str, Any], latent_BL: Tensor | None) -> Tensor:
        """Return the chunk for observations and a latent, (B, H, A)."""
        memory, positions = self.tokens(batch, latent_BL)
        for layer in self.encoder:
            memory = layer(memory, positions)
        memory = self.encoder_norm(memory)
        chunk = torch.zeros_like(self.query_positions)
        for layer in self.decoder:
            chunk = layer(chunk, self.query_positions, memory, positions)
        actions_BHA: Tensor = self.action_head(self.decoder_norm(chunk)).transpose(0, 1)
        return actions_BHA


ACTPolicy = ACT


class LatentEncoder(nn.Module):
    """Read a demonstrated chunk and tell the distribution of its latent.

    Args:
        policy: Whose sizes to take.
        depth: Number of layers.
    """

    def __init__(self, policy: ACT, depth: int) -> None:
        super().__init__()
        self.inputs, width = policy.inputs, policy.dim_model
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        if self.inputs.states:
            self.state = nn.Linear(self.inputs.width(self.inputs.states), width)
        self.action = nn.Linear(policy.action_dim, width)
        self.layers = nn.ModuleList([EncoderLayer(*policy.layer_sizes) for _ in range(depth)])
        self.norm = nn.LayerNorm(width) if policy.layer_sizes[-1] else nn.Identity()
        self.out = nn.Linear(width, 2 * policy.latent_dim)
        self.lead = 1 + bool(self.inputs.states)
        """Tokens before the actions."""
        self.register_buffer("positions", sinusoids(self.lead + policy.horizon, width)[:, None], persistent=False)

    def forward(self, batch: Mapping[str, Any], actions_BHA: Tensor, valid_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance of the latent, each (B, L)."""
        actions_HBD = self.action(actions_BHA.transpose(0, 1))
        parts = [self.cls.expand(-1, actions_BHA.shape[0], -1)]
        if self.inputs.states:
            parts.append(self.state(self.inputs.vectors(batch, self.inputs.states)[:, -1]).unsqueeze(0))
        tokens = torch.cat([*parts, actions_HBD])
        is_pad_BS = functional.pad(valid_BH, (self.lead, 0), value=1.0) == 0
        bias_B1S = torch.zeros_like(is_pad_BS, dtype=tokens.dtype).masked_fill(is_pad_BS, float("-inf")).unsqueeze(1)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            # Only the first token is read in the end, so the last layer need not compute the others.
            tokens = layer(tokens, self.get_buffer("positions"), bias_B1S, keep=1 if number == last else None)
        mean_BL, log_variance_BL = self.out(self.norm(tokens[0])).chunk(2, dim=1)
        return mean_BL, log_variance_BL


class ObservationTokens(nn.Module):
    """Turn a latent and normalised observations into tokens with positions.

    Args:
        policy: Whose sizes and inputs to take.
    """

    def __init__(self, policy: ACT) -> None:
        super().__init__()
        self.inputs, width = policy.inputs, policy.dim_model
        inputs, steps = self.inputs, policy.n_obs_steps
        self.latent = nn.Linear(policy.latent_dim, width)
        self.groups = [names for names in (inputs.states, inputs.environments) if names]
        self.vectors = nn.ModuleList([nn.Linear(inputs.width(names), width) for names in self.groups])
        if inputs.task is not None:
            self.task = nn.Embedding(inputs.num_tasks, width)
        if inputs.texts:
            self.text = nn.Linear(inputs.width(inputs.texts), width)
        count = 1 + steps * len(self.groups) + (inputs.task is not None) + bool(inputs.texts)
        self.positions = nn.Parameter(torch.randn(count, 1, width))
        if inputs.images:
            options = replace(policy.images, fetch_weights=not policy.is_restored)
            self.image_size = options.size
            self.image_encoder = make_image_encoder(inputs, options)
            self.image_projection = nn.Conv2d(self.image_encoder.out_channels, width, kernel_size=1)
            if steps > 1:
                self.step_positions = nn.Parameter(torch.randn(steps, 1, 1, width))

    def forward(self, batch: Mapping[str, Any], latent_BL: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return tokens (T, B, D) and positions (T, 1, D); no latent means zero."""
        inputs = self.inputs
        parts = [
            project(inputs.vectors(batch, names).transpose(0, 1))
            for project, names in zip(self.vectors, self.groups, strict=True)
        ]
        if inputs.task is not None:
            parts.append(self.task(inputs.task_index(batch)).unsqueeze(0))
        if inputs.texts:
            parts.append(self.text(inputs.text(batch)).unsqueeze(0))
        positions: list[Tensor] = [self.positions]
        if inputs.images:
            self._add_images(batch, parts, positions)
        if latent_BL is None:
            latent_BL = parts[0].new_zeros(parts[0].shape[1], self.latent.in_features)
        return torch.cat([self.latent(latent_BL).unsqueeze(0), *parts]), torch.cat(positions)

    def _add_images(self, batch: Mapping[str, Any], parts: list[Tensor], positions: list[Tensor]) -> None:
        steps = self.inputs.n_obs_steps
        cameras = self.inputs.pictures(batch, self.image_size)
        for maps in encode_cameras(cameras, lambda images: self.image_projection(self.image_encoder(images))):
            _, width, height_map, width_map = maps.shape
            # (B * T, D, h, w) -> (T * h * w, B, D); the channels lie last in memory.
            pixels = maps.permute(0, 2, 3, 1).reshape(-1, steps, height_map * width_map, width)
            parts.append(pixels.permute(1, 2, 0, 3).flatten(0, 1))
            places = sinusoids_2d(height_map, width_map, width).to(maps)
            spread = places[None, :, None].expand(steps, -1, -1, -1)
            if steps > 1:
                spread = spread + self.step_positions
            positions.append(spread.flatten(0, 1))
