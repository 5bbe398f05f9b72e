"""The benchmark of what grows: what it counts is what the tests of the loop count."""

from __future__ import annotations

import pytest

from benchmarks import scale


@pytest.mark.slow
def test_a_rank_of_two_sends_two_messages_a_beat_and_stages_what_it_holds() -> None:
    found = scale.run(2, 16)
    assert set(scale._ROWS.values()) <= set(found)
    assert found["beat_messages"] == 2 and found["step_messages"] == 2
    assert found["staged"] == found["state"]
    assert found["building"] == 16 * 16 * 4
