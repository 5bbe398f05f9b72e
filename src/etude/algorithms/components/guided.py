"""Flow matching guided by a code: a chunk of actions is summed up in one of a few codes, which steers the decoder.

Now and then the code is left out in training, so that acting may go further in its direction than the data did
(classifier-free guidance). The prior learns to guess the code from what is seen.

Shape letters: B batch, H actions of a chunk, A action, K codes, D latent.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.optim import Optimizer

from etude.algorithms.components.flow import FlowTrainer, draw_path
from etude.algorithms.components.mixture import latent_of
from etude.algorithms.components.update import Components, ask
from etude.errors import ConfigError
from etude.policies.base import evaluating
from etude.policies.flow import Solver
from etude.policies.graph.latents import Codebook

Quantization = Literal["nsvq", "straight_through"]


class GuidedCodeFlow(FlowTrainer):
    """Learn posterior, codes, a decoder that works with and without a code, and a prior that guesses the code.

    Args:
        quantization: nsvq puts noise as long as the rounding error in its place, so that codes learn by the same
            gradient; straight_through passes the gradient by, and pulls codes towards latents.
        dropout: Probability that a sample's code is left out, once it is at its full value.
        dropout_epochs: Epochs over which it rises from 0.
        commitment_weight: How much the distance from latents to their codes counts.
        transport_weight: How much the loss module, if given, counts beside the velocity.
        prior_weight: How much the prior's distance from the averaged posterior counts.
        ema_decay: How slowly the average follows the posterior; the first steps follow it closely.
        replace_every: Steps between replacements of codes that nothing used.
        replace_epochs: Epochs in which codes are replaced; 0 for none.
    """

    embedder: ClassVar[str] = "proprio_projector"
    required: ClassVar[tuple[str, ...]] = (
        "vqvae_posterior", "vqvae_prior", "vqvae_codebook", "proprio_projector", "action_decoder"
    )  # fmt: skip

    def __init__(
        self,
        *parts: Any,
        quantization: Quantization = "nsvq",
        dropout: float = 0.5,
        dropout_epochs: float = 2.0,
        commitment_weight: float = 0.25,
        transport_weight: float = 0.2,
        prior_weight: float = 1.0,
        ema_decay: float = 0.999,
        replace_every: int = 10,
        replace_epochs: int = 1,
        **shared: Any,
    ) -> None:
        super().__init__(*parts, **shared)
        if quantization not in get_args(Quantization):
            raise ConfigError(f"quantization {quantization!r} is unknown; one of {', '.join(get_args(Quantization))}")
        if not 0 <= dropout <= 1 or not 0 <= ema_decay < 1 or replace_every < 1:
            raise ConfigError("dropout must be from 0 to 1, ema_decay from 0 to below 1, and replace_every at least 1")
        self.quantization, self.dropout, self.dropout_epochs = quantization, dropout, dropout_epochs
        self.commitment_weight, self.transport_weight = commitment_weight, transport_weight
        self.prior_weight, self.ema_decay = prior_weight, ema_decay
        self.replace_every, self.replace_epochs = replace_every, replace_epochs
        self.posterior_ema = copy.deepcopy(self.models["vqvae_posterior"]).requires_grad_(False).eval()
        self.updates = 0
        self._latents: Tensor | None = None  # of this step alone: what dead codes are replaced by
        self._uses: Tensor | None = None  # of codes, before this step

    def losses(self, data: Mapping[str, Any], epoch: int) -> dict[str, Tensor]:
        """Return the error of the velocity under codes, and what codes, latents and prior learn by."""
        path, seen = draw_path(data), self.observe(self.models, data)
        shown = {**seen, "action": path.actions_BHA}
        latent_BD = latent_of(ask(self.models["vqvae_posterior"], shown))
        self._uses = find_codebook(self.models["vqvae_codebook"]).uses_K.clone()
        code = ask(self.models["vqvae_codebook"], {"latent": latent_BD})
        self._latents = latent_BD.detach()
        told = {**seen, "latent": self.leave_out(quantize(latent_BD, code, self.quantization), epoch)}
        prior_BD = latent_of(ask(self.models["vqvae_prior"], seen))
        with torch.no_grad():
            averaged_BD = latent_of(ask(self.posterior_ema, shown))
        found = {
            "velocity": self.squared_error(path, told),
            "commitment": functional.mse_loss(latent_BD, code["codes"].detach()),
            "prior_posterior": functional.mse_loss(prior_BD, averaged_BD),
        }
        total = found["velocity"] + self.commitment_weight * found["commitment"]
        total = total + self.prior_weight * found["prior_posterior"]
        if self.quantization == "straight_through":  # nothing else would move the codes
            found["codebook"] = functional.mse_loss(code["codes"], latent_BD.detach())
            total = total + found["codebook"]
        if self.loss is not None:
            found["sinkhorn"] = self.transport(path, told)
            total = total + self.transport_weight * found["sinkhorn"]
        return {"total": total, **found, **self._guesses(prior_BD.detach(), code)}

    def _guesses(self, prior_BD: Tensor, code: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how often the prior guesses the code, and how many codes the batch uses."""
        codebook = self.models["vqvae_codebook"]
        with torch.no_grad(), evaluating(codebook):  # a guess is no use of a code
            guessed_B = ask(codebook, {"latent": prior_BD})["indices"]
        right = (guessed_B == code["indices"]).float().mean()
        used = functional.one_hot(code["indices"], find_codebook(codebook).codes.num_embeddings).amax(0).sum()
        return {"prior_accuracy": right, "codes_used": used.float(), "code_distance": code["distance"].mean()}

    def leave_out(self, latent_BD: Tensor, epoch: int) -> Tensor:
        """Return latents of which some are 0, which means that nothing is said."""
        risen = min(epoch / self.dropout_epochs, 1.0) if self.dropout_epochs > 0 else 1.0
        kept_B1 = torch.rand(latent_BD.shape[0], 1, device=latent_BD.device) >= self.dropout * risen
        return latent_BD * kept_B1

    def after_update(self, epoch: int) -> dict[str, Any]:
        """Let the average follow the posterior, and give codes that nothing used a new life."""
        self.updates += 1
        self._follow(min(self.ema_decay, (1 + self.updates) / (10 + self.updates)))
        latents, self._latents, uses, self._uses = self._latents, None, self._uses, None
        if latents is None or uses is None or epoch >= self.replace_epochs:
            return {}
        codebook = find_codebook(self.models["vqvae_codebook"])
        count_together(codebook, uses)
        if self.updates % self.replace_every:
            return {}
        dead_K = codebook.replace_dead(latents)
        for optimizer in self.optimizers.values():
            forget_rows(optimizer, codebook.codes.weight, dead_K)
        return {"codes_replaced": dead_K.sum()}

    @torch.no_grad()
    def _follow(self, decay: float) -> None:
        held, trained = self.posterior_ema, self.models["vqvae_posterior"]
        torch._foreach_lerp_(list(held.parameters()), [p.detach() for p in trained.parameters()], 1 - decay)
        for old, new in zip(held.buffers(), trained.buffers(), strict=True):
            old.copy_(new)

    @classmethod
    def decide(cls, models: Components, seen: dict[str, Any]) -> dict[str, Any]:
        """Add the code that the prior guesses."""
        guessed_BD = latent_of(ask(models["vqvae_prior"], seen))
        return {**seen, "latent": ask(models["vqvae_codebook"], {"latent": guessed_BD})["codes"]}

    @classmethod
    @torch.no_grad()
    def sample_actions(
        cls,
        models: Any,
        batch: Mapping[str, Any],
        n_steps: int = 10,
        solver: Solver = "euler",
        noise: Tensor | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Return normalised actions for normalised observations, (B, H, A), steered by the code that the prior guesses.

        Args:
            models: The components by name.
            batch: What is observed, as in a training batch.
            n_steps: Steps of the solver.
            solver: euler, or midpoint, which asks twice a step.
            noise: What the actions flow from, (B, H, A); drawn with the global generator unless given.
            guidance: 1 follows the code, 0 does without, and above 1 the code counts for more than it did in the data.
        """
        return cls._flow(models, batch, n_steps, solver, noise, guidance=guidance)

    @classmethod
    def velocity(
        cls, models: Components, seen: Mapping[str, Any], point_BHA: Tensor, time_B: Tensor, guidance: float = 1.0
    ) -> Tensor:
        """Return where a point moves, (B, H, A)."""
        guided_BHA = super().velocity(models, seen, point_BHA, time_B)
        if guidance == 1.0:
            return guided_BHA
        free = {**seen, "latent": torch.zeros_like(seen["latent"])}
        free_BHA = super().velocity(models, free, point_BHA, time_B)
        return torch.lerp(free_BHA, guided_BHA, guidance)


def quantize(latent_BD: Tensor, code: Mapping[str, Tensor], how: Quantization) -> Tensor:
    """Return what the decoder is told in the place of a latent, in training."""
    if how == "straight_through":
        return code["quantized"]
    # NSVQ (Vali and Backstrom 2022): noise of the same length as the rounding error, in any direction.
    noise_BD = torch.randn_like(latent_BD)
    length_B1 = code["distance"].unsqueeze(1)
    return latent_BD + length_B1 * functional.normalize(noise_BD, dim=1)


def find_codebook(model: nn.Module) -> Codebook:
    """Return the codebook inside a component."""
    found = next((module for module in model.modules() if isinstance(module, Codebook)), None)
    if found is None:
        raise ConfigError("vqvae_codebook has no module of type vq_codebook, whose codes could be replaced")
    return found


@torch.no_grad()
def count_together(codebook: Codebook, before_K: Tensor) -> None:
    """Count what all ranks used in a step, so that each of them saves the same and goes on with it."""
    if distributed.is_available() and distributed.is_initialized():
        used_K = codebook.uses_K - before_K
        distributed.all_reduce(used_K)
        codebook.uses_K.copy_(before_K + used_K)


@torch.no_grad()
def forget_rows(optimizer: Optimizer, weight: Tensor, rows_K: Tensor) -> None:
    """Let an optimizer begin anew with some rows of a parameter: what it remembers of them belongs to other codes."""
    state = optimizer.state.get(weight)
    for name, held in (state or {}).items():
        if isinstance(held, Tensor) and held.shape == weight.shape:
            # A schedule-free optimizer keeps a second copy of the weights under this name.
            fresh = weight if name == "z" else torch.zeros_like(held)
            held.copy_(torch.where(rows_K.unsqueeze(1), fresh.to(held.dtype), held))
