"""What the tests of the Hugging Face door share: a small policy, noisy data, and arguments for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from etude import Loss
from etude.engines.huggingface import BaseTrainer
from tests.crash import workload

SAMPLES = 37
"""Prime and small: epochs end inside steps."""


class ACTPolicy(nn.Module):
    """A stand-in for a policy of the user's: plain, with dropout, and with the two methods of a pretrained one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        error = (self.net(batch["x"]) - batch["y"]).square().squeeze(1)
        return {"loss": error.mean(), "worst": error.detach().max()}

    def save_pretrained(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(directory) / "model.safetensors")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ACTPolicy:
        policy = cls()
        policy.load_state_dict(load_file(Path(directory) / "model.safetensors"))
        return policy


class Noisy(workload.Noisy):
    """Those samples without weights; some can be made bad."""

    def __init__(self, samples: int = SAMPLES, bad: int | None = None, augment: bool = True) -> None:
        super().__init__(samples, augment)
        if bad is not None:
            self.x[bad] = torch.nan

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {"x": sample["x"], "y": sample["y"]}


class Steady(BaseTrainer):
    """A trainer with a loss of its own, as the guide shows it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        loss_dict = model(**inputs)
        loss = loss_dict["loss"]
        return (loss, loss_dict) if return_outputs else loss


class Weighed(BaseTrainer):
    """A token-mean loss that says what it is a mean over."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        losses = nn.functional.cross_entropy(model(inputs["x"]).transpose(1, 2), inputs["y"], reduction="none")
        return Loss((losses * inputs["mask"]).sum(), inputs["mask"].sum())


def arguments(directory: Path | str, **options: Any) -> TrainingArguments:
    """Arguments for a short, quiet run on the CPU."""
    quiet = {"use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(directory), **{**quiet, **options})


def make(directory: Path | str, kind: type[BaseTrainer] = Steady, bad: int | None = None, **options: Any) -> Any:
    """A trainer on noisy data in batches of 4, two of them a step."""
    loader_options = {"num_workers": options.pop("num_workers", 0)}
    settings = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "logging_steps": 3, **options}
    loader = DataLoader(Noisy(bad=bad), batch_size=4, shuffle=True, **loader_options)
    return kind(model=ACTPolicy(), args=arguments(directory, **settings), train_loader=loader)


def weights(trainer: Any) -> dict[str, Tensor]:
    """A copy of what was learned."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
