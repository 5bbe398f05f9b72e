"""Demonstrations of what a policy failed at: the environment's expert, from the same beginnings, disturbed the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from etude.errors import ConfigError, DataError
from etude.redteam.robot.environment import DisturbedEnvironment, Units
from etude.redteam.robot.results import StressResult
from etude.simulation.environments import make_environment
from etude.simulation.environments.base import HasExpert
from etude.simulation.record import SPLIT, Recorded, record_attempts
from etude.simulation.seeds import episode_seed


def record_failures(
    result: StressResult,
    root: Path | str,
    *,
    units: Units | None = None,
    most: int | None = None,
    images: str = "video",
    on_episode: Callable[[int, int], None] | None = None,
) -> Recorded:
    """Record how the expert does what the policy failed at, the likeliest distinct failures first.

    What is recorded is what the policy would see, with what the expert does; episodes in which the expert fails as well
    are left out. More failures, found by a longer search, are added to a dataset that is there.

    Args:
        result: What a stress test found.
        root: Directory of the dataset.
        units: One deviation of each number, as in the stress test.
        most: How many failures to show; None is all.
        images: How pictures are stored: video or image.
        on_episode: Called with the number of episodes saved and of attempts made.
    """
    env, seed = str(result.settings["env"]), int(result.settings["seed"])
    require_expert(env, result.settings["options"])
    found = [one for _, one in result.likeliest(most)]
    if not found:
        raise DataError("the search found no failure, so that there is nothing to demonstrate; search longer or harder")
    plan = {episode_seed(seed, SPLIT, one.number): np.array(one.vector) for one in found}
    settings = {key: result.settings[key] for key in ("env", "options", "weights", "seed", "space")}
    return record_attempts(
        env, root, [one.number for one in found], settings={"disturbed": True, **settings}, seed=seed,
        options=result.settings["options"], images=images, on_episode=on_episode,
        wrap=lambda inner: DisturbedEnvironment(inner, result.space, plan, units or {}),
    )  # fmt: skip


def require_expert(env: str, options: dict[str, object]) -> None:
    """Refuse an environment that has nobody to demonstrate."""
    with closing(make_environment(env, **options)) as made:
        if not isinstance(made, HasExpert):
            raise ConfigError(f"{env} comes without an expert, so that nobody can demonstrate what failed there")
