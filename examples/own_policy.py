"""A policy of your own in thirty lines, trained, saved and loaded: `python examples/own_policy.py`.

It mixes learned chunks of actions. `make_layers`, `sample_actions` and `forward` are all it has to say: shapes,
normalisation, windows, the execution of chunks and saving come from `PolicyModule`.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from etude import Trainer, TrainingConfiguration
from etude.policies import PolicyModule
from etude.policies.base import masked_loss
from etude.policies.observation import ObservationEncoder
from etude.registry import POLICY_REGISTRY


@POLICY_REGISTRY.register("prototypes")
class Prototypes(PolicyModule):
    """Mix learned chunks of actions, with weights that the observation decides.

    Args:
        prototypes: How many chunks there are to mix.
        width: Width of the hidden layer.
        chunk_size: Actions predicted at once.
        n_action_steps: Actions executed of each chunk; None is all of them.
    """

    def __init__(
        self, prototypes: int = 32, width: int = 128, chunk_size: int = 8, n_action_steps: int | None = None
    ) -> None:
        super().__init__(chunk_size, n_action_steps=n_action_steps)
        self.prototypes, self.width = prototypes, width

    def make_layers(self, spec):
        self.encoder = ObservationEncoder(spec)  # states, cameras, task and text, side by side
        self.gate = nn.Sequential(
            nn.Linear(self.encoder.out_dim, self.width), nn.ReLU(), nn.Linear(self.width, self.prototypes)
        )
        self.chunks = nn.Parameter(torch.randn(self.prototypes, self.horizon, self.action_dim))

    def sample_actions(self, batch):
        weights_BP = self.gate(self.encoder(batch)).softmax(-1)
        return torch.einsum("bp,pha->bha", weights_BP, self.chunks)

    def forward(self, batch):
        batch = self.normalizer.normalize(batch)
        actions_BHA, valid_BH = self.targets(batch)  # valid is 0 after the end of an episode
        errors_BHA = functional.l1_loss(self.sample_actions(batch), actions_BHA, reduction="none")
        return masked_loss(errors_BHA, valid_BH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/own-policy"))
    parser.add_argument("--env", default="metaworld/reach")
    parser.add_argument("--demos", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--episodes", type=int, default=20)
    options = parser.parse_args()

    from etude.data import LeRobotDataModule
    from etude.simulation.evaluate import evaluate_policy
    from etude.simulation.record import record

    data = record(options.env, options.dir / "demonstrations", episodes=options.demos).root
    config = TrainingConfiguration(training_steps=options.steps, batch_size=64, lr=1e-3, schedule="cosine")
    policy = Prototypes()  # no shapes yet: they come from the data
    Trainer(policy, LeRobotDataModule(root=data).train_data(), config=config, run=options.dir / "run").fit()

    policy.save_pretrained(options.dir / "policy")
    loaded = PolicyModule.from_pretrained(options.dir / "policy")  # found by its key, "prototypes"
    print(evaluate_policy(loaded, options.env, episodes=options.episodes).total)


if __name__ == "__main__":
    main()
