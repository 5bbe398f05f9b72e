"""Simulation as one more validation (or test) loader: its one batch is a request to run episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from etude.engines.lightning.data import no_loaders
from etude.loop.distributed import Group
from etude.rng import fold

EPISODES = 10
"""Episodes where the data module does not say (`num_rollouts_val`, `num_rollouts_test`)."""
_NAMES = {"validation": ("val_env", "num_rollouts_val"), "test": ("test_env", "num_rollouts_test")}


class Simulation:
    """A request to run episodes of an environment. A plain class, so that Lightning does not look for tensors in it."""

    def __init__(self, env: str, episodes: int, split: str, seed: int) -> None:
        self.env, self.episodes, self.split, self.seed = env, episodes, split, seed


class SimulationLoader:
    """A loader with one batch on each rank: the request."""

    def __init__(self, request: Simulation) -> None:
        self.request = request

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Simulation]:
        yield self.request


def names_environment(owner: Any, split: str) -> bool:
    """Tell whether a data module names an environment to validate or test in."""
    return getattr(owner, _NAMES[split][0], None) is not None


def with_simulation(owner: Any, trainer: Any, split: str, loaders: Any) -> Any:
    """Add a loader that simulates to those of a data module that names an environment."""
    env_name, count_name = _NAMES[split]
    if not names_environment(owner, split):
        return no_loaders() if loaders is None or loaders == [] else loaders
    episodes = int(getattr(owner, count_name, EPISODES))
    limit = trainer.limit_val_batches if split == "validation" else trainer.limit_test_batches
    if isinstance(limit, int):
        episodes = min(episodes, limit)
    request = Simulation(getattr(owner, env_name), episodes, split, trainer.root_seed)
    given = loaders.flattened if isinstance(loaders, CombinedLoader) else loaders
    given = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    return [*given, SimulationLoader(request)] if episodes else loaders


def simulate(policy: nn.Module, request: Simulation, group: Group) -> dict[str, float]:
    """Run this rank's share of the episodes and return the outcome over all ranks.

    Ranks have seeds of their own; validation and test differ by their split.
    """
    from etude.simulation.evaluate import evaluate_policy

    share = len(range(group.rank, request.episodes, group.world))
    seed = request.seed if group.world == 1 else fold(request.seed, group.rank)
    rows: list[Any] = []
    if share:
        rows = list(evaluate_policy(policy, request.env, episodes=share, split=request.split, seed=seed).rows)
    local = [float(len(rows)), sum(bool(row.success) for row in rows), sum(row.steps for row in rows)]
    episodes, successes, steps, reward = group.sum([*map(float, local), sum(float(row.reward) for row in rows)])
    return {
        "episodes": episodes, "success": successes / episodes, "steps": steps / episodes, "reward": reward / episodes,
    }  # fmt: skip
