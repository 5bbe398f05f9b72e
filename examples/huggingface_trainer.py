"""A custom loss in transformers.Trainer, made exact: train, stop anywhere, go on, and get the same weights.

    python examples/huggingface_trainer.py [directory]

The loss is a smooth L1 over chunks of actions of unequal length, where transformers alone would weigh a short chunk
as much as a long one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments

from etude import Loss
from etude.engines.huggingface import BaseTrainer

STATE, ACTION, CHUNK = 4, 2, 8


class Demonstrations(Dataset[dict[str, Tensor]]):
    """Reach for a point: the state is where we are and where we want to be, the actions lead there."""

    def __init__(self, samples: int = 512) -> None:
        generator = torch.Generator().manual_seed(0)
        self.state = torch.rand(samples, STATE, generator=generator) * 2 - 1
        self.lengths = torch.randint(1, CHUNK + 1, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.state)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        state = self.state[index] + 0.01 * torch.randn(STATE)  # augmentation, from the global generator
        step = (state[2:] - state[:2]) / CHUNK
        return {
            "state": state,
            "action": step.expand(CHUNK, ACTION),
            "valid": torch.arange(CHUNK) < self.lengths[index],
        }


class ChunkPolicy(nn.Module):
    """Predicts a chunk of actions from the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(STATE, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, CHUNK * ACTION)
        self.net = nn.Sequential(*layers)

    def forward(self, state: Tensor) -> Tensor:
        """Return actions (batch, chunk, action)."""
        actions: Tensor = self.net(state).view(-1, CHUNK, ACTION)
        return actions


# The whole of the change: nine lines.
class SmoothTrainer(BaseTrainer):
    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False) -> Any:
        actions = model(inputs["state"])
        errors = nn.functional.smooth_l1_loss(actions, inputs["action"], reduction="none", beta=0.05).sum(-1)
        loss = Loss(total=(errors * inputs["valid"]).sum(), weight=inputs["valid"].sum())
        return (loss, {"actions": actions}) if return_outputs else loss


def make(directory: Path) -> SmoothTrainer:
    """Make the trainer as one does with transformers, with loaders ready-made."""
    arguments = TrainingArguments(
        output_dir=str(directory), num_train_epochs=3, learning_rate=1e-2, gradient_accumulation_steps=4,
        lr_scheduler_type="cosine", save_steps=10, eval_strategy="epoch", logging_steps=20, bf16=True, use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    return SmoothTrainer(
        model=ChunkPolicy(),
        args=arguments,
        train_loader=DataLoader(Demonstrations(), batch_size=8, shuffle=True),
        eval_loader=DataLoader(Demonstrations(64), batch_size=16),
    )


def main() -> None:
    """Train twice: in one go, and from a checkpoint in the middle of an epoch."""
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as scratch:
        directory = given or Path(scratch)
        whole = make(directory / "whole")
        before = whole.evaluate()["eval_loss"]
        whole.train()
        after = whole.evaluate()["eval_loss"]

        resumed = make(directory / "resumed")
        resumed.train(resume_from_checkpoint=str(directory / "whole" / "checkpoint-20"))

        pairs = zip(whole.module.parameters(), resumed.module.parameters(), strict=True)
        same = all(torch.equal(one, other) for one, other in pairs)
        weights = "the same weights" if same else "other weights"
        print(f"loss {before:.4f} -> {after:.4f}; resumed in the middle of an epoch: {weights}")
        if not same or after > before / 2:
            sys.exit(1)


if __name__ == "__main__":
    main()
