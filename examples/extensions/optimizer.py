"""An optimizer of one's own: a factory whose rate stands unless the YAML says another."""

from __future__ import annotations

import torch

from etude.registry import OPTIMIZER_BUILDER_REGISTRY


@OPTIMIZER_BUILDER_REGISTRY.register("my_optim")
class MyOptimFactory:
    def __init__(self, lr: float = 0.05, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum

    def build(self, params) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=True)
