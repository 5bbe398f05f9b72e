"""Code that calls sys.exit while it is trained: an early end never looks like a good one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.cli.main import app
from etude.errors import RankError, ShortRunError
from etude.runs.directory import Run
from tests.processes import run_ranks
from tests.unit.cli.test_train import runner


class Leaving(nn.Module):
    """A policy whose forward leaves, in one way or another."""

    def __init__(self, leave: Any) -> None:
        super().__init__()
        self.at, self.leave = nn.Parameter(torch.zeros(3)), leave

    def forward(self, batch: Any) -> Any:
        self.leave()
        return {"loss": (batch["x"] - self.at).square().mean()}


class Rows:
    """A dataset that leaves at one sample."""

    def __init__(self, leave: Any) -> None:
        self.leave = leave

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 40:
            self.leave()
        return {"x": torch.ones(3)}


class LeaveAfter(Callback):
    """Leave after a step, on one rank, or while an error is told."""

    def __init__(self, leave: Any, rank: int = 0) -> None:
        self.leave, self.rank = leave, rank

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step == 3 and trainer.rank == self.rank:
            self.leave()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        sys.exit(0)


def stay() -> None:
    """Do not leave."""


def fit(run: Any, leave: Any = stay, data: Any = None, callbacks: Any = (), **options: Any) -> Any:
    config = TrainingConfiguration(training_steps=30, batch_size=4, save_every=2, **options)
    data = {"x": torch.ones(16, 3)} if data is None else data
    return Trainer(
        Leaving(leave), data, config=config, run=run, callbacks=callbacks, loggers=[], show_progress=False
    ).fit()


def raise_bare() -> None:
    raise SystemExit


@pytest.mark.parametrize(
    "leave, shown",
    [
        (lambda: sys.exit(0), r"sys.exit\(0\) in test_early_exit.py, line \d+"),
        (lambda: sys.exit(None), r"sys.exit\(\) in test_early_exit.py"),
        (lambda: sys.exit(3), r"sys.exit\(3\)"),
        (lambda: exit(0), r"sys.exit\(0\) in test_early_exit.py"),
        (raise_bare, r"sys.exit\(\) in test_early_exit.py"),
    ],
)
def test_a_forward_that_exits_is_a_short_run(tmp_path: Path, leave: Any, shown: str) -> None:
    with pytest.raises(ShortRunError, match=f"ended at step 0, before the requested 30 steps: the code called {shown}"):
        fit(tmp_path / "run", leave)
    assert Run(tmp_path / "run").state() == "failed"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_exits_is_a_short_run_with_and_without_workers(workers: int) -> None:
    with pytest.raises(ShortRunError, match=r"sys.exit\(0\) in test_early_exit.py"):
        fit(False, data=Rows(lambda: sys.exit(0)), num_workers=workers)


def test_a_worker_process_that_ends_well_is_a_short_run() -> None:
    with pytest.raises(ShortRunError, match="ended with exit code 0"):
        fit(False, data=Rows(lambda: os._exit(0)), num_workers=2)


def test_a_callback_that_exits_is_a_short_run_and_cannot_hide_it_by_exiting_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ShortRunError, match="ended at step 3"):
        fit(tmp_path / "run", callbacks=[LeaveAfter(lambda: sys.exit(0))])
    assert "ending the run failed too: SystemExit: 0" in caplog.text
    assert Run(tmp_path / "run").status()["error"].startswith("ShortRunError")


@pytest.mark.parametrize("rank, codes", [(0, [7, 6]), (1, [6, 7])])
def test_one_rank_of_two_that_exits_ends_both(rank: int, codes: list[int]) -> None:
    assert [ShortRunError.exit_code, RankError.exit_code] == [7, 6]
    assert run_ranks(lambda: fit(False, callbacks=[LeaveAfter(lambda: sys.exit(0), rank)]), 2) == codes


PLUGIN = """
import sys, torch
from etude.registry import POLICY_REGISTRY

@POLICY_REGISTRY.register("leaving")
class Leaving(torch.nn.Module):
    def __init__(self, early: bool = False):
        super().__init__()
        self.at = torch.nn.Parameter(torch.zeros(1))
        if early:
            sys.exit(0)

    def forward(self, batch):
        sys.exit(0)
"""


@pytest.mark.parametrize("early", ["true", "false"])
def test_the_command_ends_in_a_sentence_and_not_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("etude.cli.train.show_log", lambda: None)  # would outlive this test
    (tmp_path / "leaving.py").write_text(PLUGIN.replace("leaving", f"leaving_{early}"))
    (tmp_path / "x.yaml").write_text(
        f"plugins: [leaving.py]\npolicy: {{type: leaving_{early}, params: {{early: {early}}}}}\ndata: digits\n"
        "training: {training_steps: 6}\nloggers: []\n"
    )
    error = runner.invoke(app, ["train", "x.yaml"]).exception
    assert isinstance(error, ShortRunError)
    assert "the code called sys.exit(0) in leaving.py, line" in str(error)
