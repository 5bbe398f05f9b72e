"""Every split of one global batch gives the same update: the promise that a loss is a sum and a weight."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etude import Loss, Trainer, TrainingConfiguration
from tests.processes import run_ranks

GLOBAL_BATCH = 16


class TokenTrainer(Trainer):
    """A token-mean loss over sequences of unequal length."""

    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Loss:
        logits_BTV = policy(batch["x"])
        losses_BT = nn.functional.cross_entropy(logits_BTV.transpose(1, 2), batch["y"], reduction="none")
        return Loss((losses_BT * batch["mask"]).sum(), batch["mask"].sum())


class MeanTrainer(Trainer):
    """A plain mean over samples, as most people write it."""

    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": policy(batch["x"]).square().mean()}


def sequences() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(GLOBAL_BATCH * 3, 7, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (len(x), 7), generator=generator)
    lengths = torch.randint(1, 8, (len(x), 1), generator=generator)
    return {"x": x, "y": y, "mask": (torch.arange(7) < lengths).double()}


def train(trainer_class: type[Trainer], micro: int, accumulate: int, out: Path | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    config = TrainingConfiguration(
        precision="float64", batch_size=micro, gradient_accumulation_steps=accumulate, training_steps=4, lr=0.1,
        optimizer="sgd", clip_norm=0.2,
    )  # fmt: skip
    trainer = trainer_class(policy, sequences(), config=config, run=False, show_progress=False)
    trainer.fit()
    weights = {name: value.clone() for name, value in policy.state_dict().items()}
    if out is not None and trainer.rank == 0:
        save_file(weights, out)
    return weights


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float(((a[k] - b[k]).abs() / b[k].abs().clamp(min=1e-3)).max()) for k in b)


@pytest.mark.parametrize("trainer_class", [TokenTrainer, MeanTrainer])
@pytest.mark.parametrize("micro,accumulate", [(8, 2), (4, 4), (2, 8), (1, 16)])
def test_accumulating_gives_the_update_of_the_whole_batch(
    trainer_class: type[Trainer], micro: int, accumulate: int
) -> None:
    assert worst(train(trainer_class, micro, accumulate), train(trainer_class, GLOBAL_BATCH, 1)) < 1e-12


@pytest.mark.parametrize("trainer_class", [TokenTrainer, MeanTrainer])
@pytest.mark.parametrize("micro,accumulate,world", [(8, 1, 2), (4, 2, 2), (1, 8, 2), (4, 1, 4), (2, 2, 4)])
def test_spreading_over_ranks_gives_the_update_of_the_whole_batch(
    trainer_class: type[Trainer], micro: int, accumulate: int, world: int, tmp_path: Path
) -> None:
    out = tmp_path / "weights.safetensors"
    assert run_ranks(partial(train, trainer_class, micro, accumulate, out), world) == [0] * world
    assert worst(load_file(out), train(trainer_class, GLOBAL_BATCH, 1)) < 1e-12
