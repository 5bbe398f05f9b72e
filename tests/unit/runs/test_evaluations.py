"""What an evaluation measured, as reports and model cards write it."""

from __future__ import annotations

from etude.runs.evaluations import Measured
from etude.simulation.results import wilson_interval


def test_an_interval_is_rounded_once_and_the_same_as_in_the_terminal() -> None:
    interval = wilson_interval(2, 3)  # up to 0.938508
    measured = Measured("reach", 3, 2, 2 / 3, interval, 750.26, (12345.678, 23456.789))
    low, high = interval
    assert measured.interval_text() == f"{low:.1%} to {high:.1%}" == "20.8% to 93.9%"
    reward = Measured("pendulum", 3, None, None, None, 750.26, (-1.0 / 3, 2.0))
    assert reward.interval_text() == "-0.3333 to 2"
