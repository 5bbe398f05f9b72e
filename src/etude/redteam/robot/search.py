"""Where to look for failures next: by chance, or around what failed (cross-entropy).

What a round looks at is a function of (seed, round) and of what the rounds before it found, so that a search which was
interrupted goes on as if it had not been. Shape letters: N episodes, M draws, D numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etude.redteam.robot.disturbances import DISTINCT, PLAUSIBLE, DisturbanceSpace, white_distance
from etude.redteam.robot.model import FailureModel
from etude.rng import fold
from etude.simulation.environments.base import Array

PRICE = 0.1
"""What a disturbance of average likelihood costs, where a failure earns 1."""
BY_CHANCE = 0.1
"""Share of the episodes that is drawn by chance all the same, so that other kinds are found."""
DRAWS, AROUND = 3000, 0.8
"""Draws of which a round plays the best, for drawing costs nothing beside an episode; and the share of them that is
drawn around failures, the others by chance."""
KEPT, STEP = 0.5, 0.3
"""Share of the numbers of a failure that a draw around it keeps, and how far these move, in deviations."""
OPTIMISM, WEIGHT = 1.0, 0.3
"""What a deviation of the model's doubt adds to how sure a failure is, and what average unlikelihood costs where a sure
failure earns 1. With 0.3 and 0.2 the median failure of a stand-in for the policy of `benchmarks/stress.py` was likelier
than 6 % of what chance draws, with these than 19 %."""
FAR, BONUS = 2 * DISTINCT, 0.5
"""A failure beyond this distance from all that are known earns so much more, so that not all are of one place.
Without it 6 of 139 failures in the gate of the tests were that far apart, with it 67 of 138."""
_CHANCE, _CROSS_ENTROPY = 1, 2


@dataclass(frozen=True)
class Tried:
    """What episodes were tried, and how they went."""

    vectors_ND: Array
    failed_N: Array


def search_reward(space: DisturbanceSpace, vector: Array, failed: bool, nearness: float) -> float:
    """Return what an episode earns who looks for likely failures: failure minus unlikelihood.

    Args:
        space: What may happen.
        vector: What happened.
        failed: Whether the policy failed.
        nearness: How near to a failure a success was, from 0 to 1: the share of its time that it took.
    """
    return (1.0 if failed else 0.5 * nearness) - PRICE * float(space.unlikelihood(vector))


def propose_by_chance(space: DisturbanceSpace, seed: int, first: int, count: int) -> Array:
    """Draw the vectors of episodes by their likelihood alone, (N, D)."""
    streams = [np.random.default_rng(fold(seed, _CHANCE, first + place)) for place in range(count)]
    return np.stack([space.draw(generator) for generator in streams])


def propose_cross_entropy(space: DisturbanceSpace, seed: int, number: int, count: int, tried: Tried) -> Array:
    """Draw the vectors of a round around the failures that are known, but distinct from them, (N, D).

    Of many draws those are played that a model of all episodes expects to earn most, that are likely, and that are far
    from every failure found and from each other. Before the first failure there is nothing to look around, and chance
    is best.
    """
    generator = np.random.default_rng(fold(seed, _CROSS_ENTROPY, number))
    if not tried.failed_N.any():
        return np.stack([space.draw(generator) for _ in range(count)])
    white_ND = space.whiten(tried.vectors_ND)
    failures_ND = white_ND[tried.failed_N]
    vectors_MD = draw_around(space, failures_ND, generator)
    draws_MD = space.whiten(vectors_MD)
    mean_M, doubt_M = FailureModel(white_ND, tried.failed_N).predict(draws_MD)
    # A failure is no surer than 1, so that of those that are sure the likeliest is taken and not the most extreme.
    sure_M, cost_M = np.minimum(1.0, mean_M + OPTIMISM * doubt_M), WEIGHT * space.unlikelihood(vectors_MD)
    nearest_M = np.full(len(draws_MD), np.inf)
    for one in failures_ND:
        nearest_M = np.minimum(nearest_M, white_distance(one, draws_MD))
    found: list[Array] = []
    for _ in range(count):
        values_M = sure_M * (1.0 + BONUS * (nearest_M > FAR)) - cost_M
        values_M[nearest_M <= DISTINCT] = -np.inf
        best = int(values_M.argmax())
        by_chance = generator.random() < BY_CHANCE or values_M[best] == -np.inf
        found.append(space.draw(generator) if by_chance else vectors_MD[best])
        nearest_M = np.minimum(nearest_M, white_distance(space.whiten(found[-1]), draws_MD))
    return np.stack(found)


def draw_around(space: DisturbanceSpace, failures_ND: Array, generator: np.random.Generator) -> Array:
    """Return plausible vectors, most of which have some numbers of a failure, about, and all others by chance, (M, D).

    What matters in a failure is not known, and differs from one to the next: some of the draws keep just that, and are
    as different in all else as chance makes them.
    """
    size = (DRAWS, len(space.names))
    uniform, normal = generator.random(size), generator.standard_normal(size)
    drawn_MD = space.whiten(np.where(space.is_uniform, uniform, normal))
    near_MD = failures_ND[generator.integers(len(failures_ND), size=DRAWS)] + STEP * generator.standard_normal(size)
    is_kept_MD = (generator.random(size) < KEPT) & (np.arange(DRAWS) < AROUND * DRAWS)[:, None]
    vectors_MD = space.unwhiten(np.where(is_kept_MD, near_MD, drawn_MD))
    found: Array = vectors_MD[space.plausibility(vectors_MD) >= PLAUSIBLE]
    return found
