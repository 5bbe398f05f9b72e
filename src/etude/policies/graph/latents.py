"""Latents and experts: codebooks, Gaussians, gates and mixtures.

Shape letters: B batch, D width of a latent, K codes, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from etude.errors import ConfigError
from etude.policies.graph.blocks import Perceptron


class Codebook(nn.Module):
    """Replace each latent by the nearest of a number of learned codes.

    Args:
        codes: How many codes.
        width: Width of a code.
    """

    uses_K: Tensor

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, width)
        nn.init.uniform_(self.codes.weight, -1 / codes, 1 / codes)
        self.register_buffer("uses_K", torch.zeros(codes))

    def forward(self, latents: Tensor) -> dict[str, Tensor]:
        """Return what takes the latents' place, (..., D), by several names.

        Returns:
            quantized: The codes, through which gradients pass to the latents as if they were those.
            codes: The codes, with a gradient of their own.
            indices: Which codes, (...).
            distance: From each latent to its code, (...).
        """
        weight_KD = self.codes.weight
        # |z - c|^2 without |z|^2, which is the same for all codes.
        scores = weight_KD.square().sum(1) - 2 * latents @ weight_KD.t()
        indices = scores.argmin(-1)
        if self.training:
            with torch.no_grad():
                self.uses_K += torch.zeros_like(self.uses_K).index_add_(
                    0, indices.flatten(), torch.ones_like(indices.flatten(), dtype=self.uses_K.dtype)
                )
        codes = self.codes(indices)
        distance = (latents - codes).square().sum(-1).clamp(min=1e-12).sqrt()
        return {
            "quantized": latents + (codes - latents).detach(),
            "codes": codes,
            "indices": indices,
            "distance": distance,
        }

    @torch.no_grad()
    def replace_dead(self, latents: Tensor, least: float = 1.0) -> Tensor:
        """Put latents, drawn at random, in the place of the codes used less than `least` times since the last call.

        Ranks of a group add their uses up and take the draw of the first, so that their codes stay alike.

        Returns:
            True for each code that was replaced, (K,).
        """
        uses_K = self.uses_K.clone()
        rows = latents.detach().reshape(-1, latents.shape[-1])
        drawn = torch.randint(rows.shape[0], (uses_K.shape[0],)).to(rows.device)
        chosen_KD = rows[drawn].to(self.codes.weight.dtype).contiguous()
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(uses_K)
            distributed.broadcast(chosen_KD, 0)
        dead_K = uses_K < least
        self.codes.weight.copy_(torch.where(dead_K.unsqueeze(1), chosen_KD, self.codes.weight))
        self.uses_K.zero_()
        return dead_K


class Gaussian(nn.Module):
    """A normal distribution over latents, told by what is observed: a prior or a posterior.

    Args:
        in_features: Width of all inputs side by side.
        latent_dim: Width of a latent.
        hidden: Width of each hidden layer.
        activation: relu, gelu, silu or tanh.
        least_log_variance: The narrowest it may become.
    """

    def __init__(
        self,
        in_features: int,
        latent_dim: int,
        hidden: list[int] | None = None,
        activation: str = "silu",
        least_log_variance: float = -10.0,
    ) -> None:
        super().__init__()
        self.layers = Perceptron(in_features, 2 * latent_dim, hidden, activation)
        self.least = least_log_variance

    def forward(self, observed: Tensor, *more: Tensor) -> dict[str, Tensor]:
        """Return `mean`, `log_variance` and `sample`, (B, latent_dim) each; out of training the sample is the mean."""
        parts = [part.flatten(1) for part in (observed, *more)]
        out = self.layers(torch.cat(parts, dim=1) if more else parts[0])
        mean_BD, log_variance_BD = out.chunk(2, dim=1)
        log_variance_BD = log_variance_BD.clamp(min=self.least, max=10.0)
        sample_BD = mean_BD
        if self.training:
            sample_BD = mean_BD + (log_variance_BD / 2).exp() * torch.randn_like(mean_BD)
        return {"mean": mean_BD, "log_variance": log_variance_BD, "sample": sample_BD}


class Gate(nn.Module):
    """Tell how much each expert counts.

    Args:
        in_features: Width of the input.
        experts: How many experts.
        hidden: Width of each hidden layer.
        top_k: Let only so many experts count; null for all.
        temperature: Above 1 the shares are more alike, below 1 less.
        noise: Deviation of what is added to the logits in training.
    """

    def __init__(
        self,
        in_features: int,
        experts: int,
        hidden: list[int] | None = None,
        top_k: int | None = None,
        temperature: float = 1.0,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        if top_k is not None and not 1 <= top_k <= experts:
            raise ConfigError(f"top_k must be from 1 to the {experts} experts, got {top_k}")
        if temperature <= 0:
            raise ConfigError(f"temperature must be more than 0, got {temperature}")
        self.layers = Perceptron(in_features, experts, hidden, "silu", norm=True)
        self.top_k, self.temperature, self.noise = top_k, temperature, noise

    def forward(self, x_BD: Tensor) -> dict[str, Tensor]:
        """Return `weights`, which add up to 1, and the `logits` without noise, (B, E) each."""
        logits_BE = self.layers(x_BD)
        noisy_BE = logits_BE
        if self.training and self.noise:
            noisy_BE = logits_BE + self.noise * torch.randn_like(logits_BE)
        if self.top_k is not None:
            chosen = noisy_BE.topk(self.top_k, dim=-1).indices
            kept = torch.zeros_like(noisy_BE, dtype=torch.bool).scatter(
                -1, chosen, torch.ones_like(chosen, dtype=torch.bool)
            )
            noisy_BE = noisy_BE.masked_fill(~kept, -torch.inf)
        return {"weights": (noisy_BE / self.temperature).softmax(-1), "logits": logits_BE}


class MixtureOfExperts(nn.Module):
    """Ask every expert the same, and stack or weigh the answers.

    Every expert is asked for every sample, so that all of them are in the graph of every rank.

    Args:
        experts: The modules; each is described, or taken from a template, so that each has weights of its own.
    """

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        if not experts or not all(isinstance(expert, nn.Module) for expert in experts):
            raise ConfigError("experts must be a list of modules, each with its _type_ or _template_")
        if len({id(expert) for expert in experts}) != len(experts):
            raise ConfigError("two of the experts are the same module")
        self.experts = nn.ModuleList(experts)

    def forward(self, *args: Any, weights_BE: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the answers, (B, E, ...), or their sum weighed by `weights_BE`, (B, ...)."""
        answers = torch.stack([expert(*args, **kwargs) for expert in self.experts], dim=1)
        if weights_BE is None:
            return answers
        weights = weights_BE.view(*weights_BE.shape, *[1] * (answers.dim() - 2))
        return (weights * answers).sum(1)
