"""A run goes on in the order of samples that it began with, however that order is drawn today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude import Trainer, TrainingConfiguration
from etude.data.order import Order
from etude.loop import state

ROWS, BATCH = 70_000, 4


class Recording(Trainer):
    seen: list[int]

    def compute_loss(self, policy: Any, batch: Any) -> Tensor:
        self.seen += batch["number"].tolist()
        loss: Tensor = policy(batch["number"].float()[:, None]).square().mean() * 0
        return loss


def train(run: Path, steps: int) -> list[int]:
    torch.manual_seed(0)
    config = TrainingConfiguration(training_steps=steps, batch_size=BATCH, seed=3)
    trainer = Recording(nn.Linear(1, 1), {"number": torch.arange(ROWS)}, config=config, run=run)
    trainer.seen = []
    trainer.fit()
    return trainer.seen


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_goes_on_in_the_order_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(state, "ORDER_VERSION", version)
        train(tmp_path, 2)
    expected = Order(ROWS, seed=3, version=version).at(2 * BATCH, 2 * BATCH)[0]
    assert train(tmp_path, 4) == expected.tolist()


def test_a_checkpoint_that_does_not_say_is_of_the_first_order() -> None:
    assert state.order_version({"session": {}}) == 1
    assert state.order_version(None) == 2
