"""How scores of several runs are put together: the conventions of Agarwal et al., 2021 (rliable), as pure functions.

A score matrix has a row for each run (a seed) and a column for each task: `scores_RT`. Its interquartile mean leaves
out the lowest and the highest quarter of all scores. Intervals are percentiles of a stratified bootstrap, which draws
the runs of each task anew and apart from other tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

REPETITIONS = 2000
CONFIDENCE = 0.95
Z95 = 1.959963984540054
Interval = tuple[float, float]
Scores = Sequence[Sequence[float]]


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of what is left without the lowest and the highest quarter, whole values rounded down."""
    if not values:
        raise ValueError("there are no values to take a mean of")
    ordered = sorted(values)
    cut = len(ordered) // 4
    kept = ordered[cut : len(ordered) - cut]
    return math.fsum(kept) / len(kept)


def bootstrap_means(scores_RT: Scores, *, repetitions: int = REPETITIONS, seed: int = 0) -> NDArray[Any]:
    """Return the interquartile means of matrices whose runs are drawn anew, with replacement, for each task."""
    import numpy as np

    given_RT = np.asarray(scores_RT, dtype=np.float64)
    if given_RT.ndim != 2 or not given_RT.size:
        raise ValueError(f"scores must be a matrix of runs and tasks, got the shape {given_RT.shape}")
    runs, tasks = given_RT.shape
    draws_BRT = np.random.default_rng(seed).integers(0, runs, size=(repetitions, runs, tasks))
    drawn_BN = np.take_along_axis(given_RT[None], draws_BRT, axis=1).reshape(repetitions, runs * tasks)
    drawn_BN.sort(axis=1)
    cut = runs * tasks // 4
    means_B: NDArray[Any] = drawn_BN[:, cut : runs * tasks - cut].mean(axis=1)
    return means_B


def aggregate(scores_RT: Scores, *, seed: int = 0) -> tuple[float, Interval]:
    """Return the interquartile mean of a score matrix, and its 95 % interval by stratified bootstrap."""
    mean = interquartile_mean([score for row_T in scores_RT for score in row_T])
    return mean, _percentiles(bootstrap_means(scores_RT, seed=seed))


def aggregate_difference(ours_RT: Scores, theirs_RT: Scores, *, seed: int = 0) -> tuple[float, Interval]:
    """Return how far two interquartile means lie apart, ours minus theirs, and the 95 % interval of that."""
    ours, theirs = ([score for row_T in matrix for score in row_T] for matrix in (ours_RT, theirs_RT))
    drawn_B = bootstrap_means(ours_RT, seed=seed) - bootstrap_means(theirs_RT, seed=seed + 1)
    return interquartile_mean(ours) - interquartile_mean(theirs), _percentiles(drawn_B)


def interval_difference(ours: float, our_ends: Interval, theirs: float, their_ends: Interval) -> tuple[float, Interval]:
    """Return the difference of two independent estimates, and its interval from theirs.

    The ends recover each estimate's spread on the side where it counts; for Wilson's intervals of success rates that is
    Newcombe's method.
    """
    low = math.hypot(ours - our_ends[0], their_ends[1] - theirs)
    high = math.hypot(our_ends[1] - ours, theirs - their_ends[0])
    apart = ours - theirs
    return apart, (apart - low, apart + high)


def student_difference(ours_RT: Scores, theirs_RT: Scores) -> Interval:
    """Return Welch's 95 % interval of how far the means of runs lie apart, which suits few of them; two at least."""
    runs_SR = [[math.fsum(row_T) / len(row_T) for row_T in matrix] for matrix in (ours_RT, theirs_RT)]
    scale = max(abs(one) for runs_R in runs_SR for one in runs_R) or 1.0  # squares of diverged losses are no numbers
    means_S, spreads_S, freedoms_S = [], [], []
    for runs_R in runs_SR:
        scaled_R, count = [one / scale for one in runs_R], len(runs_R)
        mean = math.fsum(scaled_R) / count
        means_S.append(mean)
        spreads_S.append(math.fsum((one - mean) ** 2 for one in scaled_R) / (count - 1) / count)
        freedoms_S.append(count - 1)
    spread, apart = sum(spreads_S), means_S[0] - means_S[1]
    if spread == 0:
        return scale * apart, scale * apart
    freedom = spread**2 / sum(one**2 / freedom for one, freedom in zip(spreads_S, freedoms_S, strict=True))
    reach = student_quantile(max(min(freedoms_S), math.floor(freedom))) * math.sqrt(spread)
    return scale * (apart - reach), scale * (apart + reach)


def student_quantile(freedom: int, z: float = Z95) -> float:
    """Return the 97.5 % quantile of Student's distribution; the first two by their own formulas, others expanded."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return float(0.95 * math.sqrt(2 / (1 - 0.95**2)))
    # Cornish and Fisher's expansion about the normal distribution: within 0.004 from three degrees of freedom on.
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def improvement_probability(ours_RT: Scores, theirs_RT: Scores) -> float:
    """Return how likely a run of ours beats one of theirs on a task drawn at random; a tie counts half."""
    tasks = len(ours_RT[0])
    if tasks != len(theirs_RT[0]):
        raise ValueError("both sides need scores of the same tasks")
    total = 0.0
    for task in range(tasks):
        pairs = [(mine[task], other[task]) for mine in ours_RT for other in theirs_RT]
        total += sum(1.0 if mine > other else 0.5 if mine == other else 0.0 for mine, other in pairs) / len(pairs)
    return total / tasks


def _percentiles(drawn_B: NDArray[Any]) -> Interval:
    import numpy as np

    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn_B, [tail, 1 - tail])
    return float(low), float(high)
