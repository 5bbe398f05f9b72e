"""Three ways to a trainer of one's own, each on the engine of one's choice.

    python examples/custom_trainers.py [torch|huggingface|lightning]

Override a hook to change one thing, bring an algorithm to swap it without touching policy or data, bring a `train_step`
to make the whole update. Nothing in the classes says which engine they run on, and the numbers do not depend on it.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

from etude import Loss, Trainer, TrainingConfiguration
from etude.data import Digits
from etude.policies import MLP


# 1. Override a hook.
class Smooth(Trainer):
    def compute_loss(self, policy, batch):
        losses = functional.cross_entropy(policy.predict(batch), batch["action"], label_smoothing=0.1, reduction="none")
        return Loss(losses.sum(), weight=len(losses))


# 2. Bring an algorithm: any object with `loss(policy, batch)`.
class Focal:
    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def loss(self, policy, batch):
        losses = functional.cross_entropy(policy.predict(batch), batch["action"], reduction="none")
        hard = (1 - (-losses).exp()) ** self.gamma  # what is known already counts less
        return Loss((hard * losses).sum(), weight=len(losses), metrics={"hard": hard.mean()})


# 3. Bring a `train_step`: sharpness-aware minimisation takes two backward passes for one update.
class SharpnessAware(Trainer):
    radius = 0.05

    def train_step(self, batch):
        optimizer, params = self.optimizers["policy"], list(self.policy.parameters())
        optimizer.zero_grad()
        functional.cross_entropy(self.policy.predict(batch), batch["action"]).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        climbs = [p.grad * (self.radius / (norm + 1e-12)) for p in params]
        self.move(params, climbs, 1.0)
        optimizer.zero_grad()
        loss = functional.cross_entropy(self.policy.predict(batch), batch["action"])
        loss.backward()
        self.move(params, climbs, -1.0)
        optimizer.step()
        return {"loss": loss.item()}

    @torch.no_grad()
    def move(self, params, by, sign):
        for param, distance in zip(params, by):
            param.add_(distance, alpha=sign)


def accuracy(trainer: Trainer) -> float:
    """Train, and return the share of digits read rightly."""
    trainer.fit()
    held_out = Digits("validation")
    batch = {name: torch.stack([sample[name] for sample in held_out]) for name in held_out[0]}
    with torch.no_grad():
        return float((trainer.policy.eval().predict(batch).argmax(1) == batch["action"]).float().mean())


def main(engine: str) -> None:
    """Train all three."""
    config = TrainingConfiguration(training_steps=60, lr=3e-3, batch_size=64)
    common = {"engine": engine, "config": config, "run": False, "show_progress": False}
    makes = {
        "hook": lambda: Smooth(MLP(hidden=[64]), Digits(), **common),
        "algorithm": lambda: Trainer(MLP(hidden=[64]), Digits(), Focal(gamma=1.0), **common),
        "train_step": lambda: SharpnessAware(MLP(hidden=[64]), Digits(), **common),
    }
    for name, make in makes.items():
        print(f"{name}: {accuracy(make()):.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "torch")
