"""Train with Lightning: a policy without shapes, exact resume, a loss of your own, and Lightning as an engine.

Run: python examples/lightning_trainer.py [directory]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import etude
from etude.data.windows import statistics
from etude.engines.lightning import Trainer, load_policy
from etude.policies.mlp import MLP
from etude.types import DataSpec, Feature

SAMPLES = 256


class Reaching(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Demonstrations: move towards a goal. The state is hand and goal, the action half the way."""

    def __init__(self, seed: int = 0) -> None:
        self.state = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(seed))
        self.action = (self.state[:, 2:] - self.state[:, :2]) / 2
        state = Feature((4,), role="state", stats=statistics(self.state))
        action = Feature((2,), role="action", stats=statistics(self.action))
        self.spec = DataSpec({"observation.state": state, "action": action})

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = 0.01 * torch.randn(4)  # from the global generator: a resume repeats it all the same
        return {"observation.state": self.state[index] + noise, "action": self.action[index]}


class ReachingData(lightning.LightningDataModule):
    """A data module as Lightning has them; its dataset says what the features are."""

    def setup(self, stage: str) -> None:
        self.train_dataset, self.val_dataset = Reaching(0), Reaching(1)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.train_dataset, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.val_dataset, batch_size=32)


def quiet(root: Path, epochs: int, **options: object) -> Trainer:
    """Make a trainer that writes into `root`."""
    return Trainer(
        max_epochs=epochs, default_root_dir=root, accelerator="cpu", optimizer={"lr": 3e-3}, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def train_and_resume(root: Path) -> None:
    """Train in one go, then again from a checkpoint in the middle of an epoch: the weights are the same."""
    policy = MLP(hidden=[64], dropout=0.1)  # no shapes: they come from the data module
    every_five = ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    trainer = quiet(root, 4, experiment_name="reaching", callbacks=[every_five])
    trainer.fit(policy, ReachingData())
    print(f"loss on held-out demonstrations: {float(trainer.callback_metrics['val/loss']):.4f}")

    saved = root / "reaching" / "version_0" / "checkpoints"
    resumed = MLP(hidden=[64], dropout=0.1)
    quiet(root, 4).fit(resumed, ReachingData(), ckpt_path=saved / "epoch=1-step=15.ckpt")
    same = all(torch.equal(a, b) for a, b in zip(policy.parameters(), resumed.parameters(), strict=True))
    print(f"resumed from step 15, bit for bit: {same}")

    ready = load_policy(saved)  # needs no data
    print(f"first action: {ready.select_action({'observation.state': torch.tensor([[0.0, 0.0, 1.0, 1.0]])})[0]}")


class Huber(etude.Trainer):
    """Another loss, on any engine."""

    def compute_loss(self, policy: nn.Module, batch: dict[str, Tensor]) -> etude.Loss:
        seen = policy.normalizer.normalize(batch)
        target, valid = policy.targets(seen)
        errors = nn.functional.smooth_l1_loss(policy.outputs(seen), target, reduction="none").mean(-1)
        return etude.Loss((errors * valid).sum(), valid.sum())


def compare_engines() -> None:
    """Train with that loss on two engines: the numbers are the same."""
    config = etude.TrainingConfiguration(training_steps=30, batch_size=32, lr=3e-3, device="cpu")
    losses = []
    for engine in ("torch", "lightning"):
        trainer = Huber(MLP(hidden=[64]), Reaching(), engine=engine, config=config, run=False, show_progress=False)
        losses.append(trainer.fit().metrics["train/loss"])
    print(f"torch and lightning end with the same loss: {losses[0] == losses[1]}")


if __name__ == "__main__":
    train_and_resume(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
    compare_engines()
