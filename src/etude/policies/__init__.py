"""What is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.policies.act import ACT, ACTPolicy
    from etude.policies.actor_critic import ActorCritic
    from etude.policies.base import PolicyModule, masked_loss
    from etude.policies.components import ComponentPolicy
    from etude.policies.diffusion import Diffusion
    from etude.policies.executor import ActionExecutor
    from etude.policies.flow import FlowMatching
    from etude.policies.mlp import MLP
    from etude.policies.observation import ObservationEncoder
    from etude.policies.residual import ResidualPolicy
    from etude.policies.soft_actor_critic import SoftActorCritic

__all__ = ["ACT", "MLP", "ACTPolicy", "ActionExecutor", "ActorCritic", "ComponentPolicy", "Diffusion", "FlowMatching"]
__all__ += ["ObservationEncoder", "PolicyModule", "ResidualPolicy", "SoftActorCritic", "masked_loss"]

_HOMES = {
    "act": ("ACT", "ACTPolicy"),
    "actor_critic": ("ActorCritic",),
    "base": ("PolicyModule", "masked_loss"),
    "components": ("ComponentPolicy",),
    "diffusion": ("Diffusion",),
    "executor": ("ActionExecutor",),
    "flow": ("FlowMatching",),
    "mlp": ("MLP",),
    "observation": ("ObservationEncoder",),
    "residual": ("ResidualPolicy",),
    "soft_actor_critic": ("SoftActorCritic",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
