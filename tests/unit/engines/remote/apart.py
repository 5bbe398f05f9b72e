"""What trains here and on a service alike: the same adapters on the same tiny model, and how to look at both."""

from __future__ import annotations

import gc
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude import TrainingConfiguration
from etude.rollouts.text import TextRollouts
from etude.runs.checkpoint import CheckpointStore
from etude.runs.metrics import read_metrics
from etude.runs.tensor_file import read_tensor_file
from etude.service.server.bases import Adapter, Bases
from tests.served import KEY, Served

RANK, SEED = 8, 5
QUICK: dict[str, Any] = {
    "lr": 3e-3,
    "batch_size": 8,
    "training_steps": 2,
    "log_every": 1,
    "device": "cpu",
    "seed": SEED,
}
# Where gradients are nothing but rounding, Adam with its usual eps would make whole steps of it.
STEADY: dict[str, Any] = {"optimizer_params": {"eps": 1e-4}, "clip_norm": 1.0, "weight_decay": 0.01}


@contextmanager
def quiet_client() -> Iterator[None]:
    """Context in which the client has its key, and what it leaves open at the end is closed without complaint."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TINKER_API_KEY", KEY)
        patch.setenv("TINKER_TELEMETRY", "0")
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def adapted() -> Any:
    """Return the policy that a service makes of the same rank and seed."""
    torch.set_num_threads(1)
    return Bases(["tiny"]).make("tiny", Adapter(RANK, SEED))


def digits(**options: Any) -> TextRollouts:
    return TextRollouts("digits", **{"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, **options})


def quick(**training: Any) -> TrainingConfiguration:
    return TrainingConfiguration(**{**QUICK, **training})


def weights_in(policy: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in policy.named_parameters() if one.requires_grad}


def saved_path(run: Path) -> str:
    """Return the name on the service that the newest checkpoint of a run holds."""
    (saved,) = CheckpointStore(run / "checkpoints").load().tree["policy"].values()
    return bytes(saved.tolist()).decode()


def weights_on(served: Served, run: Path) -> dict[str, Tensor]:
    """Return what the newest checkpoint of a run names, from the folder of the service."""
    model, kind, name = saved_path(run).removeprefix("tinker://").split("/")
    with closing(sqlite3.connect(served.folder / "service.db")) as db:
        query = "SELECT file FROM checkpoints WHERE model=? AND kind=? AND name=?"
        (file,) = db.execute(query, (model, kind, name)).fetchone()
    tensors = read_tensor_file(served.folder / "weights" / file)
    return {key.removeprefix("weights."): one for key, one in tensors.items() if key.startswith("weights.")}


def steps_on(served: Served) -> int:
    """Return how many steps a service has made, of all its models."""
    with closing(sqlite3.connect(served.folder / "service.db")) as db:
        (found,) = db.execute("SELECT SUM(steps) FROM models").fetchone()
    return int(found or 0)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row]
