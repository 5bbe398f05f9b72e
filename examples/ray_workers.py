"""Two Ray workers share a batch, one is killed, and the run still gets there: `python examples/ray_workers.py`."""

import argparse
import os
import signal

from etude import Trainer, TrainingConfiguration
from etude.data import Digits
from etude.engines.ray import RayEngine
from etude.policies import MLP


class Unlucky(Trainer):
    """A trainer whose second worker is killed once, in the middle of its work."""

    def prepare_batch(self, batch):
        killed = self.run.dir / "killed"
        if self.rank == 1 and self.progress.step == self.config.training_steps // 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--dir", default="runs/ray-workers")
options = parser.parse_args()

policy = MLP(hidden=[32])
engine = RayEngine(num_workers=2, max_failures=1)  # uses the cluster of RAY_ADDRESS, or starts one here
config = TrainingConfiguration(training_steps=options.steps, batch_size=32, lr=2e-3, save_every=5, device="cpu")
trainer = Unlucky(policy, Digits(), engine=engine, config=config, eval_data=Digits("validation"), run=options.dir)
result = trainer.fit()
weights = sum(parameter.numel() for parameter in policy.parameters())
print(f"step {result.steps}, loss {result.metrics['eval/loss']:.3f}, {weights} trained weights")
