"""Variational flow matching: a latent chooses among experts, each of which is a flow of its own.

Shape letters: B batch, H actions of a chunk, A action, E experts, D latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from etude.algorithms.component_losses import load_balancing_loss, router_z_loss
from etude.algorithms.components.flow import FlowPath, FlowTrainer, draw_path
from etude.algorithms.components.update import Components, ask


class VariationalFlow(FlowTrainer):
    """Learn experts' velocities, weighed by a gate over a latent that the prior has to guess without the actions.

    In training the posterior sees the actions and its latent moves the gate; acting goes by the prior's.

    Args:
        transport_weight: How much the loss module, if given, counts beside the velocity.
        prior_weight: How much the distance of prior and posterior counts.
        z_weight: How much the gate's z-loss counts, which keeps its logits small.
        balance_weight: How much the gate's load balance counts, which keeps all experts in use.
    """

    decoder: ClassVar[str] = "moe_action_decoder"
    required: ClassVar[tuple[str, ...]] = (
        "vqvae_posterior", "vqvae_prior", "info_embedder", "gate", "moe_action_decoder"
    )  # fmt: skip

    def __init__(
        self,
        *parts: Any,
        transport_weight: float = 0.2,
        prior_weight: float = 1.0,
        z_weight: float = 0.001,
        balance_weight: float = 0.01,
        **shared: Any,
    ) -> None:
        super().__init__(*parts, **shared)
        self.transport_weight, self.prior_weight = transport_weight, prior_weight
        self.z_weight, self.balance_weight = z_weight, balance_weight

    def losses(self, data: Mapping[str, Any], epoch: int) -> dict[str, Tensor]:
        """Return the weighed errors of the experts, the distance of prior and posterior, and the gate's losses."""
        path, seen = draw_path(data), self.observe(self.models, data)
        posterior = ask(self.models["vqvae_posterior"], {**seen, "action": path.actions_BHA})
        prior = ask(self.models["vqvae_prior"], seen)
        gate = self.gate(self.models, seen, latent_of(posterior))
        told = {**seen, "latent": latent_of(posterior), "weights": gate["weights"]}
        found = {
            "velocity": self.weighed_error(path, told),
            "prior_posterior": prior_distance(posterior, prior),
            "z_loss": router_z_loss(gate["logits"]),
            "load_balance": first_choice_balance(gate["logits"], gate["weights"]),
        }
        total = found["velocity"] + self.prior_weight * found["prior_posterior"]
        total = total + self.z_weight * found["z_loss"] + self.balance_weight * found["load_balance"]
        if self.loss is not None:
            found["sinkhorn"] = self.transport(path, told)
            total = total + self.transport_weight * found["sinkhorn"]
        with torch.no_grad():
            found["largest_share"] = gate["weights"].mean(0).max()
        return {"total": total, **found}

    def weighed_error(self, path: FlowPath, told: Mapping[str, Any]) -> Tensor:
        """Return the squared errors of all experts, each counting as much as the gate says."""
        asked = {**told, "noisy": path.point_BHA, "time": path.time_B}
        errors_BEHA = (ask(self.models[self.decoder], asked) - path.velocity_BHA.unsqueeze(1)).square()
        return path.mean(torch.einsum("be,beha->bha", told["weights"], errors_BEHA))

    @classmethod
    def velocity(cls, models: Components, seen: Mapping[str, Any], point_BHA: Tensor, time_B: Tensor) -> Tensor:
        """Return the experts' velocities, weighed, (B, H, A)."""
        answers_BEHA = ask(models[cls.decoder], {**seen, "noisy": point_BHA, "time": time_B})
        return torch.einsum("be,beha->bha", seen["weights"], answers_BEHA)

    @classmethod
    def decide(cls, models: Components, seen: dict[str, Any]) -> dict[str, Any]:
        """Add the prior's latent and the shares that it gives the experts."""
        latent_BD = latent_of(ask(models["vqvae_prior"], seen))
        return {**seen, "latent": latent_BD, "weights": cls.gate(models, seen, latent_BD)["weights"]}

    @staticmethod
    def gate(models: Components, seen: Mapping[str, Any], latent_BD: Tensor) -> dict[str, Tensor]:
        """Return `weights`, of which a gate with top_k leaves only so many above 0, and `logits`, (B, E) each."""
        out: dict[str, Tensor] = ask(models["gate"], {**seen, "latent": latent_BD})
        return out


def latent_of(found: Any) -> Tensor:
    """Return the latent of a component that gives one, or a distribution with a `sample`."""
    latent: Tensor = found["sample"] if isinstance(found, Mapping) else found
    return latent


def prior_distance(posterior: Any, prior: Any) -> Tensor:
    """Return how far the prior is from the posterior, by dimension: of Gaussians KL(posterior || prior), else squared.

    For distributions N(m, exp(v)): (v_p - v_q + (exp(v_q) + (m_q - m_p)^2) / exp(v_p) - 1) / 2.
    """
    if not isinstance(posterior, Mapping) or not isinstance(prior, Mapping):
        return (latent_of(prior) - latent_of(posterior)).square().mean()
    between = posterior["log_variance"] - prior["log_variance"]
    apart = (posterior["mean"] - prior["mean"]).square() / prior["log_variance"].exp()
    found: Tensor = 0.5 * (between.exp() + apart - 1 - between).mean()
    return found


def first_choice_balance(logits_BE: Tensor, weights_BE: Tensor) -> Tensor:
    """Return the load balance of the experts that the samples chose first: 1 where all are chosen alike."""
    chosen_BE = torch.zeros_like(logits_BE).scatter(1, weights_BE.argmax(1, keepdim=True), 1.0)
    return load_balancing_loss(logits_BE.softmax(1), chosen_BE)
