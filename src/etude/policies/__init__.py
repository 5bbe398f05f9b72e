"""What is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.policies.act import ACT, ACTPolicy
    from etude.policies.base import PolicyModule, masked_loss
    from etude.policies.diffusion import Diffusion
    from etude.policies.executor import ActionExecutor
    from etude.policies.flow import FlowMatching
    from etude.policies.mlp import MLP
    from etude.policies.observation import ObservationEncoder

__all__ = ["ACT", "MLP", "ACTPolicy", "ActionExecutor", "Diffusion", "FlowMatching", "ObservationEncoder"]
__all__ += ["PolicyModule", "masked_loss"]

_HOMES = {
    "ACT": "act",
    "ACTPolicy": "act",
    "ActionExecutor": "executor",
    "Diffusion": "diffusion",
    "FlowMatching": "flow",
    "MLP": "mlp",
    "ObservationEncoder": "observation",
    "PolicyModule": "base",
    "masked_loss": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.policies' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"etude.policies.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
