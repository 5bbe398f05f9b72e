"""The benchmark of what grows: what it counts is what the tests of the loop count."""

from __future__ import annotations

import pytest

from benchmarks import scale
from tests.processes import reap, spawn


@pytest.mark.slow
def test_a_rank_of_two_sends_two_messages_a_beat_and_stages_what_it_holds() -> None:
    found = scale.run(2, 16)
    assert set(scale._ROWS.values()) <= set(found)
    assert found["beat_messages"] == 2 and found["step_messages"] == 2
    assert found["staged"] == found["state"]
    assert found["building"] == 16 * 16 * 4


@pytest.mark.nightly
def test_messages_of_every_part_are_as_many_at_32_ranks_as_at_8() -> None:
    few, many = scale.run(8, 32), scale.run(32, 32)
    for part in ("step_messages", "log_messages", "beat_messages", "save_messages"):
        assert many[part] == pytest.approx(few[part], rel=0.1), part
    assert many["staged"] == many["state"] < few["state"]


def count_one_and_three() -> None:
    from benchmarks import scale_ray

    one, three = scale_ray.count_all([1, 3])
    assert one == three, "workers share nothing with each other"
    assert one["episode_calls"] == 3 and one["publication_calls"] == 1 and one["publication_bytes"] == 0
    assert one["draw_calls"] < 0.5 and one["draw_bytes"] > 0


@pytest.mark.slow
def test_what_a_rollout_worker_sends_does_not_grow_with_their_number() -> None:
    pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (extra: sim)")
    assert reap(spawn(count_one_and_three), 300.0) == [0]
