"""The loss is yours in fifteen lines: `python examples/custom_loss.py`."""

import argparse

from torch.nn import functional

from etude import Loss, Trainer, TrainingConfiguration
from etude.data import Digits
from etude.policies import MLP


class Focal(Trainer):
    def compute_loss(self, policy, batch):
        logits, digits = policy.predict(batch), batch["action"]
        losses = functional.cross_entropy(logits, digits, reduction="none")
        hard = (1 - (-losses).exp()) ** 2  # what is known already counts less
        accuracy = (logits.argmax(1) == digits).float().mean()
        return Loss((hard * losses).sum(), weight=len(digits), metrics={"accuracy": accuracy})


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--dir", default="runs/custom-loss")
options = parser.parse_args()

config = TrainingConfiguration(training_steps=options.steps, lr=2e-3)
trainer = Focal(MLP(hidden=[64]), Digits(), eval_data=Digits("validation"), config=config, run=options.dir)
print(trainer.fit().metrics["eval/accuracy"])
