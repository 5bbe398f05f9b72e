"""What the Lightning tests share: data that draws from every generator, small policies, a stub environment."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from etude import Loss
from etude.data.windows import statistics
from etude.engines.lightning import Trainer
from etude.simulation.environments.base import StepOutcome
from etude.types import DataSpec, Feature

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

Weights = dict[str, Tensor]


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples whose augmentation draws from all three global generators; `bad` holds NaN."""

    def __init__(self, samples: int = 22, bad: int | None = None) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = 0.1 * torch.randn(4) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
        x = torch.full((4,), index / self.samples) + noise
        x = x * float("nan") if index == self.bad else x
        return {"x": x, "y": x.sum(0, keepdim=True)}


class Net(nn.Module):
    """A plain policy with dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return {"loss": nn.functional.mse_loss(self.net(batch["x"]), batch["y"])}


class Module(lightning.LightningModule):
    """A LightningModule as people write them: a mean, a schedule, validation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if "a" in batch else [batch]
        loss: Tensor = sum(self.inner(part)["loss"] for part in parts)  # type: ignore[assignment]
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.inner(batch)["loss"], batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TokenMean(nn.Module):
    """A policy whose loss is a mean over tokens, of which samples have unequally many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, batch: dict[str, Tensor]) -> Loss:
        errors = (self.net(batch["x"]).squeeze(-1) - batch["y"]).square() * batch["mask"]
        return Loss(errors.sum(), batch["mask"].sum())


class Tokens(Dataset[dict[str, Tensor]]):
    """Sixteen samples of 1 to 7 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(16, 7, 4, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, 8, (16, 1), generator=generator)
        self.mask = (torch.arange(7) < lengths).double()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.x[index].sum(-1), "mask": self.mask[index]}


class Moves(Dataset[dict[str, Tensor]]):
    """States and actions with a spec and windows, as robot data has."""

    def __init__(self, samples: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.state = torch.randn(samples, 3, generator=generator)
        self.action = self.state[:, :2] * 5 + 7
        stats = {"observation.state": self.state, "action": self.action}
        roles: dict[str, Any] = {"observation.state": "state", "action": "action"}
        self.spec = DataSpec(
            {
                name: Feature(tuple(value.shape[1:]), role=roles[name], stats=statistics(value))
                for name, value in stats.items()
            }
        )
        self.windows: list[int] = [0]

    def use_windows(self, observation: list[int] | None = None, action: list[int] | None = None) -> None:
        self.windows = list(action or [0])

    def __len__(self) -> int:
        return len(self.state)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = torch.tensor(self.windows) + index
        actions = self.action[at.clamp(max=len(self) - 1)]
        return {"observation.state": self.state[index], "action": actions, "action_is_pad": at >= len(self)}


class MovesModule:
    """A data module that knows nothing of Lightning."""

    def __init__(self, val_env: str | None = None, test_env: str | None = None, batch_size: int = 8) -> None:
        self.train_dataset, self.val_dataset = Moves(), Moves(10)
        self.val_env, self.test_env, self.batch_size = val_env, test_env, batch_size
        self.num_rollouts_val, self.num_rollouts_test = 5, 7

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_dataset, 4)


class Reach:
    """A stub environment: succeeds when the seed of the episode is even after two steps; remembers its seeds."""

    seeds: list[int] = []

    def __init__(self) -> None:
        self.spec, self.fps, self.max_steps, self.task = Moves().spec, 10.0, 2, "reach"

    def reset(self, seed: int) -> dict[str, Any]:
        Reach.seeds.append(seed)
        self._seed, self._steps = seed, 0
        return {"observation.state": np.zeros(3, np.float32)}

    def step(self, action: Any) -> StepOutcome:
        self._steps += 1
        done = self._steps == 2
        success = done and (self._seed >> 2) % 2 == 0
        return StepOutcome({"observation.state": np.ones(3, np.float32)}, 1.0, success, done, success, {})

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)

    def close(self) -> None:
        pass


def loader(samples: int = 22, bad: int | None = None, size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(samples, bad), batch_size=size, shuffle=True, **options)


def make(root: Path, save: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """Make a trainer that writes little; `save` says when to write checkpoints into root/saved."""
    callbacks = options.pop("callbacks", [])
    if save is not None:
        callbacks = [*callbacks, ModelCheckpoint(dirpath=root / "saved", **{"save_top_k": -1, **save})]
    settings: dict[str, Any] = {
        "max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": root, "optimizer": {"lr": 1e-2},
        "enable_checkpointing": save is not None,
    }  # fmt: skip
    return Trainer(**{**settings, **options, "callbacks": callbacks})


def weights(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(root: Path) -> list[Path]:
    return sorted((root / "saved").glob("*.ckpt"))
