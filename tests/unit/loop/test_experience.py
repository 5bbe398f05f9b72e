"""Who makes experience of rollouts: the session, once a step, whatever becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.algorithms import DPO, PPO
from etude.policies import ActorCritic
from etude.registry import ENVIRONMENT_REGISTRY
from etude.rollouts.explore import EnvironmentRollouts
from etude.runs.metrics import read_metrics
from etude.types import Batch, Loss, Updates
from tests.processes import run_ranks
from tests.unit.algorithms.stand_in import Bigram
from tests.unit.simulation.point_reach import PointReach


class Counting(PPO):
    """PPO that counts who asks it for what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.experiences, self.losses = 0, 0

    def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Batch:
        self.experiences += 1
        found = super().experience(policy, batch, rows=rows)
        self.metrics = {"experiences": (float(self.experiences), float(len(found)))}
        return found

    def loss(self, policy: Any, batch: Any) -> Loss:
        self.losses += 1
        return super().loss(policy, batch)


def train(monkeypatch: pytest.MonkeyPatch, run: Any = False, accumulate: int = 1, **options: Any) -> Counting:
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)
    torch.set_num_threads(1)
    algorithm = Counting(gamma=0.9, **options)
    config = TrainingConfiguration(
        batch_size=2, training_steps=2, log_every=1, gradient_accumulation_steps=accumulate, device="cpu"
    )
    data = EnvironmentRollouts("point_reach", 8, slots=4, options={"max_steps": 3})
    Trainer(
        ActorCritic(hidden=[4]), data, algorithm, config=config, run=run, loggers=[], show_progress=False
    ).fit()  # fmt: skip
    return algorithm


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("epochs, minibatches", [(1, 1), (2, 2), (3, 4)])
def test_an_algorithm_makes_one_experience_a_step(
    monkeypatch: pytest.MonkeyPatch, accumulate: int, epochs: int, minibatches: int
) -> None:
    algorithm = train(monkeypatch, accumulate=accumulate, epochs=epochs, minibatches=minibatches)
    assert algorithm.experiences == 2
    assert algorithm.losses == 2 * epochs * 4


@pytest.mark.slow
def test_each_of_two_ranks_makes_one_experience_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rank() -> None:
        algorithm = train(monkeypatch, tmp_path / "run", epochs=2, minibatches=2)
        assert algorithm.experiences == 2 and algorithm.losses >= 2 * 2 * 2

    assert run_ranks(rank, 2) == [0, 0]


def test_what_an_algorithm_reports_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train(monkeypatch, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["train/experiences"] for row in rows] == [1.0, 2.0]


def test_an_algorithm_may_cut_its_experience_into_updates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuts(PPO):
        def experience(self, policy: Any, batch: Any, *, rows: int | None = None) -> Any:
            whole = super().experience(policy, batch, rows=rows)
            return Updates([[part] for part in whole.split(4)])

    taken: list[int] = []
    monkeypatch.setattr(Cuts, "prepare", lambda self, policy, batch: batch)
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)

    class Watched(Trainer):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            taken.append(len(batch))
            return super().compute_loss(policy, batch)

    config = TrainingConfiguration(batch_size=2, training_steps=1)
    data = EnvironmentRollouts("point_reach", 8, slots=4, options={"max_steps": 3})
    Watched(ActorCritic(hidden=[4]), data, Cuts(), config=config, run=False, loggers=[], show_progress=False).fit()
    assert taken == [4, 4]


def test_given_pairs_are_still_prepared_micro_batch_by_micro_batch() -> None:
    seen: list[int] = []

    class Noted(DPO):
        def prepare(self, policy: Any, batch: Any) -> Batch:
            seen.append(len(batch["chosen_input_ids"]))
            return super().prepare(policy, batch)

    ids = torch.randint(0, 5, (8, 4))
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones(8, 4)}
    pairs = {f"{side}_{name}": value for side in ("chosen", "rejected") for name, value in columns.items()}
    config = TrainingConfiguration(batch_size=2, gradient_accumulation_steps=2, training_steps=1)
    Trainer(Bigram(), pairs, Noted(), config=config, run=False, loggers=[], show_progress=False).fit()
    assert seen == [2, 2]
