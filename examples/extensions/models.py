"""The models that are trained together: an encoder and a decoder, each with an optimizer of its own."""

from __future__ import annotations

from torch import nn

from etude.registry import POLICY_REGISTRY

from .shapes import ACTION, STATE


@POLICY_REGISTRY.register("my_models")
def my_models(width: int = 32) -> nn.ModuleDict:
    """Return the models by name."""
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(STATE, width), nn.Tanh()),
            "decoder": nn.Linear(width, ACTION),
        }
    )
