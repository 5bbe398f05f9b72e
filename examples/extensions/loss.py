"""A loss of one's own: a factory, made with the parameters of the YAML, that builds a module."""

from __future__ import annotations

from torch import nn

from etude.registry import LOSS_BUILDER_REGISTRY


@LOSS_BUILDER_REGISTRY.register("my_loss")
class MyLossFactory:
    def __init__(self, beta: float = 1.0) -> None:
        self.beta = beta

    def build(self) -> nn.Module:
        return nn.SmoothL1Loss(beta=self.beta)
