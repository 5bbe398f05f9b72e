"""Where to look for failures next: by chance, or around what came nearest to one (cross-entropy).

What a round looks at is a function of (seed, round) and of what the rounds before it found, so that a search which was
interrupted goes on as if it had not been. Shape letters: N episodes, D numbers, K components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from etude.redteam.robot.disturbances import DISTINCT, PLAUSIBLE, DisturbanceSpace
from etude.rng import fold
from etude.simulation.environments.base import Array

PRICE = 0.1
"""What a disturbance of average likelihood costs, where a failure earns 1."""
COMPONENTS = 4
"""Failures of so many kinds are followed at a time."""
BY_CHANCE, AT_FIRST, ENOUGH = 0.1, 0.4, 10
"""Share of the episodes that is drawn by chance all the same, so that other kinds are found; and before so many failed.
"""
FEWEST_FAILURES = 2
"""Before so many are known there is nothing to look around, and chance is best."""
FEW, LEAST_WIDTH, CLEAR = 3.0, 0.8, 1.5
"""Rows that a component trusts no more than chance, how narrow it may become, in deviations, and how many standard
errors a mean is to be away from that of chance."""
DRAWS, WEIGHT, MANY = 16, 0.4, 40
"""Draws of which the best is played, for drawing costs nothing beside an episode; and what the log-likelihood of a draw
weighs beside how much it looks like a failure, once so many are known."""
_CHANCE, _CROSS_ENTROPY = 1, 2


@dataclass(frozen=True)
class Tried:
    """What episodes were tried, and how they went."""

    vectors_ND: Array
    failed_N: Array
    rewards_N: Array
    """What each earns who looks for failures."""


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
    """Draw the vectors of a round around the best so far, away from the failures that are known, (N, D).

    A mixture of Gaussians is fitted to the elites, a component to each cluster of them, and another to all others. Of
    some draws of the first, the one is played that is most like the elites and least like the others, among those that
    are plausible, and distinct from every failure found and from each other.
    """
    generator = np.random.default_rng(fold(seed, _CROSS_ENTROPY, number))
    if int(tried.failed_N.sum()) < FEWEST_FAILURES:
        return np.stack([space.draw(generator) for _ in range(count)])
    elites, others = split_elites(tried)
    wanted = Components.fit(space.whiten(tried.vectors_ND[elites]), generator)
    passed = Components.fit(space.whiten(tried.vectors_ND[others]), generator) if len(others) else None
    known = list(tried.vectors_ND[tried.failed_N])
    failures = len(known)
    by_chance = BY_CHANCE if failures >= ENOUGH else AT_FIRST
    found: list[Array] = []
    for _ in range(count):
        vector = (
            None if generator.random() < by_chance else _best_draw(space, wanted, passed, known, failures, generator)
        )
        found.append(space.draw(generator) if vector is None else vector)
        known.append(found[-1])
    return np.stack(found)


def _best_draw(
    space: DisturbanceSpace, wanted: Components, passed: Components | None, known: list[Array],
    failures: int, generator: np.random.Generator,
) -> Array | None:  # fmt: skip
    """Return the draw that looks most like the elites and least like the others; None if all is known there."""
    white_ND = wanted.draw(DRAWS, generator)
    vectors_ND = space.unwhiten(white_ND)
    is_good = space.plausibility(vectors_ND) >= PLAUSIBLE
    if known:
        taken_ND = np.stack(known)
        is_good &= np.array([bool((space.distance(one, taken_ND) > DISTINCT).all()) for one in vectors_ND])
    if not is_good.any():
        return None
    vectors_ND = vectors_ND[is_good]
    white_ND = space.whiten(vectors_ND)
    ratio_N = wanted.log_density(white_ND) - (0.0 if passed is None else passed.log_density(white_ND))
    # With few failures the ratio says little, and weighing the likelihood would only avoid whatever is rare.
    weight = WEIGHT * min(1.0, failures / MANY)
    best: Array = vectors_ND[int(np.argmax(ratio_N + weight * space.log_likelihood(vectors_ND)))]
    return best


def split_elites(tried: Tried) -> tuple[Array, Array]:
    """Return the numbers of the elites, the failures that earn most, up to half of all; and of the successes."""
    count = min(int(tried.failed_N.sum()), max(1, len(tried.failed_N) // 2))
    order = np.lexsort((-tried.rewards_N, ~tried.failed_N))
    return order[:count], np.flatnonzero(~tried.failed_N)


@dataclass(frozen=True)
class Components:
    """A mixture of Gaussians, each with a width of its own in every direction, in deviations."""

    means_KD: Array
    widths_KD: Array
    shares_K: Array

    @classmethod
    def fit(cls, rows_ND: Array, generator: np.random.Generator) -> Components:
        """Return a component for each cluster of rows."""
        means, widths, counts = [], [], []
        for rows in cluster(rows_ND, min(COMPONENTS, max(1, len(rows_ND) // 5)), generator):
            # An estimate from few rows is drawn to what chance does, and a mean that chance explains is that of
            # chance: right for numbers that do not matter, in which failures are to stay as different as they can be.
            share = len(rows) / (len(rows) + FEW)
            is_clear = np.abs(rows.mean(0)) * math.sqrt(len(rows)) > CLEAR
            means.append(np.where(is_clear, share * rows.mean(0), 0.0))
            widths.append(np.maximum(LEAST_WIDTH, share * rows.std(0) + (1 - share)))
            counts.append(len(rows))
        return cls(np.stack(means), np.stack(widths), np.array(counts) / sum(counts))

    def draw(self, count: int, generator: np.random.Generator) -> Array:
        """Draw rows, (N, D)."""
        chosen = generator.choice(len(self.shares_K), size=count, p=self.shares_K)
        noise = generator.standard_normal((count, self.means_KD.shape[1]))
        found: Array = self.means_KD[chosen] + self.widths_KD[chosen] * noise
        return found

    def log_density(self, rows_ND: Array) -> Array:
        """Return the logarithm of the density at rows, up to a constant, (N,)."""
        apart = (rows_ND[:, None] - self.means_KD[None]) / self.widths_KD[None]
        each_NK = -0.5 * np.square(apart).sum(-1) - np.log(self.widths_KD).sum(-1)[None] + np.log(self.shares_K)[None]
        found: Array = np.logaddexp.reduce(each_NK, axis=1)
        return found


def cluster(rows_ND: Array, count: int, generator: np.random.Generator, rounds: int = 10) -> list[Array]:
    """Return rows in groups that lie together (k-means, begun with rows that are far from each other)."""
    centres = [rows_ND[int(generator.integers(len(rows_ND)))]]
    while len(centres) < count:
        apart = np.min([np.square(rows_ND - centre).sum(1) for centre in centres], axis=0)
        centres.append(rows_ND[int(apart.argmax())])
    centres_KD = np.stack(centres)
    for _ in range(rounds):
        nearest = np.square(rows_ND[:, None] - centres_KD[None]).sum(-1).argmin(1)
        centres_KD = np.stack([
            rows_ND[nearest == one].mean(0) if (nearest == one).any() else centres_KD[one] for one in range(count)
        ])  # fmt: skip
    return [rows_ND[nearest == one] for one in range(count) if (nearest == one).any()]
