"""A trainer of one's own: it is given the models, their optimizers, a loss and a device, and makes the whole update.

It knows nothing of engines, checkpoints or ranks: what it keeps (`self.seen`) is saved and resumed with the run, and on
several ranks gradients are those of all of them.
"""

from __future__ import annotations

import torch

from etude.registry import TRAINER_REGISTRY


@TRAINER_REGISTRY.register("my_trainer")
class MyTrainer:
    def __init__(self, models, optimizers, loss, device, clip_norm: float = 1.0):
        self.models, self.optimizers, self.loss, self.clip_norm = models, optimizers, loss, clip_norm
        self.seen = 0

    def train_step(self, data, **kwargs) -> dict:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        predicted = self.models["decoder"](self.models["encoder"](data["observation.state"]))
        loss = self.loss(predicted, data["action"])
        loss.backward()
        norms = {
            f"grad_norm_{name}": torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)
            for name, model in self.models.items()
        }
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.seen += len(predicted)
        return {"loss": loss, "seen": self.seen, "epoch": kwargs["epoch"], **norms}
