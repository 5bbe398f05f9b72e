"""Validation and test by simulation: where the data module names an environment, with seeds that never meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.engines.lightning.simulation import Simulation, simulate
from etude.loop.distributed import Group
from etude.policies.mlp import MLP
from etude.registry import ENVIRONMENT_REGISTRY
from etude.simulation.seeds import episode_seed
from tests.processes import run_ranks
from tests.unit.engines.lightning.parts import Moves, MovesModule, Reach, make

ENVIRONMENT_REGISTRY.add("lightning_test_reach", Reach)
ENV = "lightning_test_reach"


@pytest.fixture(autouse=True)
def _forget() -> None:
    Reach.seeds.clear()


@pytest.mark.slow
def test_validation_and_test_simulate_on_seeds_of_their_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_epochs=1)
    policy = MLP(hidden=[8], chunk_size=2)
    trainer.fit(policy, MovesModule(ENV, ENV))
    validated = list(Reach.seeds)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    successes = sum((seed >> 2) % 2 == 0 for seed in validated)
    assert len(validated) == 5 and metrics["val/episodes"] == 5
    assert metrics["val/success"] == pytest.approx(successes / 5)
    assert {"val/loss", "val/steps", "val/reward"} <= metrics.keys()
    assert validated == [episode_seed(0, "validation", number) for number in range(5)]
    Reach.seeds.clear()
    (tested,) = trainer.test(policy, MovesModule(ENV, ENV))
    assert len(Reach.seeds) == 7 and tested["test/episodes"] == 7
    assert not set(validated) & set(Reach.seeds)
    Reach.seeds.clear()
    *_, again = trainer.validate(policy, MovesModule(ENV))
    assert validated == Reach.seeds and again["val/success"] == metrics["val/success"]


@pytest.mark.slow
def test_a_quick_run_simulates_one_episode(tmp_path: Path) -> None:
    make(tmp_path, fast_dev_run=True).fit(MLP(hidden=[8]), MovesModule(ENV))
    assert len(Reach.seeds) == 1


@pytest.mark.slow
def test_ranks_share_the_episodes_and_their_counts_add_up(tmp_path: Path) -> None:
    def work() -> None:
        group = Group.join("cpu")
        policy = MLP(hidden=[8])
        policy.build(Moves().spec)
        found: dict[str, Any] = {}
        for split in ("validation", "test"):
            Reach.seeds.clear()
            outcome = simulate(policy.eval(), Simulation(ENV, 5, split, 3), group)
            found[split] = {"seeds": list(Reach.seeds), "outcome": outcome}
        (tmp_path / f"{group.rank}.json").write_text(json.dumps(found))

    assert run_ranks(work, 2) == [0, 0]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    seeds = [seed for found in ranks for split in found.values() for seed in split["seeds"]]
    assert len(seeds) == len(set(seeds)) == 10
    for split in ("validation", "test"):
        here = [seed for found in ranks for seed in found[split]["seeds"]]
        assert ranks[0][split]["outcome"] == ranks[1][split]["outcome"]
        assert ranks[0][split]["outcome"]["episodes"] == 5
        assert ranks[0][split]["outcome"]["success"] == sum((seed >> 2) % 2 == 0 for seed in here) / 5
