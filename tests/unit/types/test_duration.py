from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.types.duration import Duration, Progress


@pytest.mark.parametrize(
    "text,value,unit",
    [
        (500, 500, "steps"),
        ("500", 500, "steps"),
        ("1_000 steps", 1000, "steps"),
        ("1 step", 1, "steps"),
        ("2 epochs", 2, "epochs"),
        ("0.5 epoch", 0.5, "epochs"),
        ("1e6 tokens", 1e6, "tokens"),
        ("10 env_steps", 10, "env_steps"),
        ("10 env steps", 10, "env_steps"),
        ("90 s", 90, "seconds"),
        ("30 min", 1800, "seconds"),
        ("1.5h", 5400, "seconds"),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: Any, value: float, unit: str) -> None:
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    "text", ["", "fast", "10 parsecs", "-3", "0", "1.5 steps", True, None, [1], "nan s", "inf", 1.5]
)
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        Duration.parse(text)


@given(st.integers(1, 50), st.integers(1, 500))
def test_a_cadence_is_due_once_per_multiple(every: int, steps: int) -> None:
    cadence = Duration(every)
    due = [s for s in range(1, steps + 1) if cadence.due(Progress(step=s - 1), Progress(step=s))]
    assert due == list(range(every, steps + 1, every))


def test_every_unit_reads_its_own_counter() -> None:
    progress = Progress(step=1, epochs=2.0, tokens=3.0, env_steps=4, seconds=5.0)
    found = [Duration(1, unit).measure(progress) for unit in ("steps", "epochs", "tokens", "env_steps", "seconds")]
    assert found == [1, 2, 3, 4, 5]
