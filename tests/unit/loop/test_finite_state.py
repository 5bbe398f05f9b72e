"""What the update itself breaks is never saved: the checkpoint before stays the newest; the error says what broke."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.errors import NonFiniteError
from etude.loop import guard
from etude.loop.optimizers import Optimization
from etude.runs.checkpoint import CheckpointStore
from tests.processes import run_ranks


class Mean(nn.Module):
    """A weight, statistics, and a mask that is infinite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, batch: Any) -> Any:
        self.norm(batch["x"])
        return {"loss": (batch["x"] - self.at).square().mean()}


class Break(Callback):
    """Break something after a step, as an update may."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step == self.step:
            with torch.no_grad():
                self.act(trainer.session)


def train(
    run: Any, at: int = 6, act: Any = None, kind: type[Trainer] = Trainer, steps: int = 20, **options: Any
) -> Any:
    settings: dict[str, Any] = {"batch_size": 4, "save_every": 2, "ema_decay": 0.9, **options}
    config = TrainingConfiguration(training_steps=steps, **settings)
    x = torch.arange(48.0).view(16, 3)
    callbacks = [] if act is None else [Break(at, act)]
    return kind(Mean(), {"x": x}, config=config, run=run, loggers=[], callbacks=callbacks, show_progress=False).fit()


BROKEN = {
    "weights or buffers not finite in at ": lambda s: s.policy.at.fill_(float("nan")),
    "weights or buffers not finite in norm.running_mean ": lambda s: s.policy.norm.running_mean.fill_(float("inf")),
    "averaged weights not finite in at ": lambda s: s.ema.shadow["at"].fill_(float("inf")),
    "optimizer state not finite in policy.": lambda s: (
        s.optimizations["policy"].optimizer.state[s.policy.at]["exp_avg_sq"].fill_(float("inf"))
    ),
}


@pytest.mark.parametrize("said", BROKEN)
def test_nothing_that_is_not_finite_is_saved_and_the_run_goes_on_from_before(tmp_path: Path, said: str) -> None:
    with pytest.raises(NonFiniteError, match=f"step 6: {said}.*after the update. Nothing was saved; the last good"):
        train(tmp_path / "run", act=BROKEN[said])
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load("last").step == 4
    assert train(tmp_path / "run").steps == 20


def test_the_end_is_checked_too_even_where_nothing_is_saved() -> None:
    with pytest.raises(NonFiniteError, match="step 20: weights or buffers not finite in at "):
        train(False, at=20, act=BROKEN["weights or buffers not finite in at "], save_every=None)


def test_an_update_that_breaks_the_weights_is_found_at_its_own_save(tmp_path: Path) -> None:
    class HugeRate(Trainer):
        def configure_optimizers(self) -> Any:
            rate = torch.optim.SGD(self.policy.parameters(), lr=1.0)
            return Optimization(rate, lambda step: 3e38 if step == 5 else 0.01, None)

    with pytest.raises(NonFiniteError, match="step 6: weights or buffers not finite in at "):
        train(tmp_path / "run", kind=HugeRate)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [2, 4]


def test_both_ranks_end_with_the_code_of_what_is_not_finite(tmp_path: Path) -> None:
    act = BROKEN["weights or buffers not finite in norm.running_mean "]
    assert run_ranks(lambda: train(tmp_path / "run", act=act), 2) == [NonFiniteError.exit_code] * 2


def test_a_sum_that_overflows_accuses_nobody() -> None:
    assert guard.not_finite({"large": torch.full((8,), 3e38), "half": torch.full((8,), 6e4, dtype=torch.float16)}) == []
    bad = {"a": torch.ones(2), "b": torch.tensor([float("inf"), float("-inf")]), "n": torch.tensor([1])}
    assert guard.not_finite(bad) == ["b"]


def test_an_evaluation_that_is_nan_does_not_stay_the_best(tmp_path: Path) -> None:
    class Odd(Trainer):
        def evaluate(self) -> dict[str, float]:
            return {"loss": float("nan") if self.progress.step < 6 else 1.0}

    result = train(tmp_path / "run", kind=Odd, steps=10, evaluate_every=2)
    assert result.best is not None
    assert result.best.name == "step-00000006"
