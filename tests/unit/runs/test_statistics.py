"""How scores of several runs are put together, against values worked out by hand and published ones."""

from __future__ import annotations

import numpy as np
import pytest

from etude.runs.statistics import (
    aggregate,
    aggregate_difference,
    bootstrap_means,
    improvement_probability,
    interquartile_mean,
    interval_difference,
    student_difference,
)
from etude.simulation.results import wilson_interval


@pytest.mark.parametrize(
    "values, mean",
    [
        ([8, 1, 7, 2, 6, 3, 5, 4], 4.5),  # (3 + 4 + 5 + 6) / 4
        ([10, 0, 1, 2], 1.5),  # without 0 and 10
        ([0, 1, 100], 101 / 3),  # a quarter of three is none
        ([1, 2, 3, 4, 1000], 3.0),  # (2 + 3 + 4) / 3
        ([7], 7.0),
    ],
)
def test_the_interquartile_mean_leaves_a_quarter_out_at_either_end(values: list[float], mean: float) -> None:
    assert interquartile_mean(values) == pytest.approx(mean)


def test_an_empty_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        interquartile_mean([])
    with pytest.raises(ValueError, match="matrix"):
        bootstrap_means([])


def test_runs_are_drawn_within_their_task() -> None:
    """Drawn over tasks together, a hundred and nothing would mix; drawn within them, each draw is the same."""
    assert set(bootstrap_means([[0.0, 100.0], [0.0, 100.0]])) == {50.0}


def test_two_runs_have_the_three_means_that_two_draws_can_have() -> None:
    means, counts = np.unique(bootstrap_means([[0.0], [1.0]], repetitions=4000), return_counts=True)
    assert list(means) == [0.0, 0.5, 1.0]
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert aggregate([[0.0], [1.0]]) == (0.5, (0.0, 1.0))


def test_the_same_scores_have_the_same_interval_each_time() -> None:
    scores = [[0.1, 0.4], [0.3, 0.5], [0.2, 0.9], [0.25, 0.7]]
    mean, (low, high) = aggregate(scores)
    assert mean == pytest.approx((0.25 + 0.3 + 0.4 + 0.5) / 4)
    assert low < mean < high
    assert aggregate(scores) == (mean, (low, high))


def test_a_difference_is_one_only_beyond_its_interval() -> None:
    ours, theirs = [[0.8], [0.82], [0.81], [0.79]], [[0.5], [0.9], [0.7], [0.95]]
    apart, (low, high) = aggregate_difference(ours, theirs)
    assert apart == pytest.approx(0.805 - 0.8)
    assert low < 0 < high
    apart, (low, high) = aggregate_difference(ours, [[0.5], [0.52], [0.51], [0.49]])
    assert apart == pytest.approx(0.3)
    assert 0.25 < low < high < 0.35


def test_few_runs_differ_as_welch_says() -> None:
    """27.5, 21, 19 against 27.1, 22, 20.8: t = -0.268 of 3.54 degrees of freedom, which are rounded down."""
    low, high = student_difference([[27.5], [21.0], [19.0]], [[27.1], [22.0], [20.8]])
    spread = (19.75 + 11.083) / 3
    assert (low + high) / 2 == pytest.approx(-0.8)
    assert (high - low) / 2 == pytest.approx(3.1824 * spread**0.5, rel=0.01)
    assert student_difference([[1.0, 3.0], [2.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]]) == (1.0, 1.0), "runs that agree"
    far = student_difference([[27.5e200], [21e200], [19e200]], [[27.1e200], [22e200], [20.8e200]])
    assert far == pytest.approx((low * 1e200, high * 1e200)), "losses that diverged"


def test_success_rates_differ_as_newcombe_published() -> None:
    """56 of 70 against 48 of 80: 0.0524 to 0.3339 (Newcombe, 1998, method 10), from Wilson's intervals of both."""
    apart, (low, high) = interval_difference(0.8, wilson_interval(56, 70), 0.6, wilson_interval(48, 80))
    assert apart == pytest.approx(0.2)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_the_probability_of_improvement_counts_pairs() -> None:
    assert improvement_probability([[3.0], [3.0]], [[2.0], [3.0]]) == 0.75  # 1, 0.5, 1, 0.5
    assert improvement_probability([[1.0, 9.0]], [[2.0, 5.0]]) == 0.5  # lost one task, won the other
    with pytest.raises(ValueError, match="same tasks"):
        improvement_probability([[1.0]], [[1.0, 2.0]])
