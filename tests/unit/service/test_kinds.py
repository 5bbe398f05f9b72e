"""Each kind of trainer: killed and resumed bit for bit, and on two ranks what one process makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude.runs.checkpoint import CheckpointStore
from etude.runs.metrics import read_metrics
from tests.callbacks import DieAt
from tests.crash.harness import compare, differs
from tests.processes import reap, run_ranks, spawn
from tests.unit.service.held import QUICK, digits, tiny
from tests.unit.service.kinds import KINDS


@pytest.fixture(scope="module", autouse=True)
def all_imported() -> None:
    """Import here, once, what every forked process would otherwise import for itself."""
    train("self_hosted", False, training_steps=1)


SETTINGS = {"train_service": {"config": {"learning_rate": 1e-3, "eps": 1e-3}}, "algorithm": {"epochs": 2}}


def train(name: str, run: Any, die_at: int | None = None, **training: Any) -> None:
    KINDS[name](SETTINGS).fit(
        tiny(), digits(), run=run, loggers=[], show_progress=False, callbacks=[] if die_at is None else [DieAt(die_at)],
        training={**QUICK, "training_steps": 5, "save_every": 2, "ema_decay": 0.9, **training},
    )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert reap(spawn(partial(train, name, tmp_path / "whole"))) == [0]
    assert reap(spawn(partial(train, name, tmp_path / "killed", 2))) == [-9]
    assert reap(spawn(partial(train, name, tmp_path / "killed"))) == [0]
    assert compare(tmp_path / "killed", tmp_path / "whole") is None
    ends = [CheckpointStore(tmp_path / run / "checkpoints").load("last").tree for run in ("killed", "whole")]
    assert differs(ends[0]["algorithm"], ends[1]["algorithm"], "kept") is None
    assert ends[0]["algorithm"]["inner"]["now"]


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_make_what_one_process_makes(name: str, tmp_path: Path) -> None:
    steps = {"training_steps": 3, "lr": 1e-3}
    # An eps that is not small keeps Adam from turning the rounding of a tiny gradient into a step of full size.
    options = {**steps, "optimizer_params": {"eps": 1e-3}}
    assert run_ranks(lambda: train(name, tmp_path / "alone", **options), 1) == [0]
    assert run_ranks(lambda: train(name, tmp_path / "shared", **{**options, "batch_size": 4}), 2) == [0, 0]
    one, other = (CheckpointStore(tmp_path / run / "checkpoints").load("last").tree for run in ("alone", "shared"))
    begun = tiny().state_dict()
    assert max((one["policy"][key] - begun[key]).abs().max().item() for key in begun) > 1e-4
    assert max((one["policy"][key] - other["policy"][key]).abs().max().item() for key in begun) < 1e-6
    logged = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("alone", "shared")]
    for first, second in zip(*logged, strict=True):
        for key in (key for key in first if key.startswith("train/")):
            assert first[key] == pytest.approx(second[key], abs=2e-5), key
