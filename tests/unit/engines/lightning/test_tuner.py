"""Lightning's Tuner: batch sizes and learning rates of policies, and of modules that return a Loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from etude import Loss
from etude.policies.mlp import MLP
from tests.unit.engines.lightning.parts import MovesModule, Net, TokenMean, Tokens, loader, make, same, weights


class Module(lightning.LightningModule):
    """A module that returns a Loss, and says its own batch size and rate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.batch_size, self.learning_rate = TokenMean(), 2, 1e-3

    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        found: Loss = self.inner(batch)
        return found

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(), self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def test_batch_sizes_are_found_for_policies(tmp_path: Path) -> None:
    data, policy = MovesModule(batch_size=3), MLP(hidden=[8])
    trainer = make(tmp_path, max_epochs=2)
    assert Tuner(trainer).scale_batch_size(policy, datamodule=data, init_val=4, max_trials=2) == 8
    assert data.batch_size == 8
    trainer.fit(policy, datamodule=data)
    assert trainer.global_step == 6  # 24 samples in batches of 8, twice


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_batch_sizes_are_found_for_modules_that_return_a_loss(tmp_path: Path, mode: str) -> None:
    module = Module()
    found = Tuner(make(tmp_path, max_epochs=1)).scale_batch_size(module, mode=mode, max_trials=2, margin=0.0)
    assert found == module.batch_size == 4


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore:.*progress bar:UserWarning")
def test_learning_rates_are_found_and_the_weights_are_as_before(tmp_path: Path, accumulate: int) -> None:
    options: dict[str, Any] = {"max_epochs": 20, "accumulate_grad_batches": accumulate}
    policy, trainer = Net(), make(tmp_path, **options)
    before = weights(policy)
    finder = Tuner(trainer).lr_find(policy, loader(), num_training=30, early_stop_threshold=None)
    assert finder is not None and finder.suggestion() is not None
    assert same(weights(policy), before)
    trainer.fit(policy, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == finder.suggestion()
    fresh = Net()
    make(tmp_path, optimizer={"lr": finder.suggestion()}, **options).fit(fresh, loader())
    assert same(weights(policy), weights(fresh))


def test_the_rate_is_searched_by_the_mean_of_a_loss(tmp_path: Path) -> None:
    class Mean(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = self.inner(batch)
            return found.total / found.weight

    losses = []
    for module in (Module(), Mean()):
        finder = Tuner(make(tmp_path, max_epochs=20)).lr_find(module, num_training=20, early_stop_threshold=None)
        assert finder is not None
        assert module.learning_rate == finder.suggestion()
        losses.append(finder.results["loss"])
    assert losses[0] == losses[1]
