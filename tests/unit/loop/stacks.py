"""A small policy with everything that makes sharding awkward, and training of it on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from etude import Trainer, TrainingConfiguration
from etude.engines.torch import TorchEngine


class Stack(nn.Module):
    """Blocks that no number of ranks divides, a parameter of one number, buffers, a frozen layer; built when training
    starts, as policies are that take their shapes from the data."""

    needs_spec = False

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.width, self.is_built = width, False

    def build(self, spec: Any) -> None:
        width = self.width
        self.inp = nn.Linear(4, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table_TD", torch.linspace(0, 1, 7 * width).sin().view(7, width))
        nn.init.orthogonal_(self.blocks[0][0].weight)
        self.is_built = True
        self.was_lean = self.out.weight.untyped_storage().data_ptr() == 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = torch.tanh(self.inp(x)) + self.table_TD.mean(0)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.out(x) * self.gain
        return out


class Regression(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (policy(batch["x"]) - batch["y"]).square().mean()}


def rows(count: int = 48) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True)}


def fit(run: Any, micro: int, strategy: Literal["ddp", "fsdp"] = "fsdp", **options: Any) -> Regression:
    """Train; `policy` and `callbacks` go to the trainer, all else to its configuration."""
    policy, callbacks = options.pop("policy", None) or Stack(), options.pop("callbacks", ())
    settings: dict[str, Any] = {"training_steps": 8, "batch_size": micro, "lr": 1e-2, "ema_decay": 0.9, "save_every": 4}
    trainer = Regression(
        policy, rows(), config=TrainingConfiguration(**{"freeze": ["inp.*"], **settings, **options}), run=run,
        engine=TorchEngine(strategy=strategy), loggers=[], callbacks=callbacks, show_progress=False,
    )  # fmt: skip
    trainer.fit()
    return trainer


def worst(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference between two trees of the same shape."""
    assert a.keys() == b.keys()
    found = [0.0]
    for key, value in b.items():
        if isinstance(value, dict):
            found.append(worst(a[key], value))
        elif isinstance(value, Tensor):
            assert a[key].shape == value.shape and a[key].dtype == value.dtype
            found.append(float((a[key].double() - value.double()).abs().max()) if value.numel() else 0.0)
    return max(found)


def state(run: Path) -> dict[str, Any]:
    """What of a run's newest checkpoint training goes on from."""
    from etude.runs.checkpoint import CheckpointStore

    tree = CheckpointStore(run / "checkpoints").load("last").tree
    optimizer = {name: one["state"] for name, one in tree["optimizer"].items()}
    # How often a buffer has counted depends on how many batches a rank sees.
    return {"policy": {k: v for k, v in tree["policy"].items() if k != "seen"}, "ema": tree["ema"], "opt": optimizer}
