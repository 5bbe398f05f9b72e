"""The benchmark of red-teaming: a planted weakness is found, every seed is told, and SmolLM2 is probed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import redteam


def test_every_seed_is_told() -> None:
    made: list[int] = []

    def make(seed: int) -> dict[str, Any]:
        made.append(seed)
        return {"beyond_baseline": seed != 1}

    assert [row["beyond_baseline"] for row in redteam.main(3, make)] == [True, False, True]
    assert made == [0, 1, 2]


@pytest.mark.slow
def test_a_planted_weakness_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = redteam.main(1)
    assert found["beyond_baseline"] and found["mean"] > 0.9 > 0.5 > found["baseline_interval"][1]
    said = capsys.readouterr().out
    assert ", beyond the interval; diversity of probes" in said
    assert said.count("\n  before ") == said.count("\n  after ") == redteam.SHOWN


@pytest.mark.slow
@pytest.mark.parametrize(
    "probe", [redteam.smollm2, pytest.param(redteam.language, marks=pytest.mark.nightly)], ids=["by words", "by itself"]
)
def test_smollm2_is_probed(probe: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    found = probe(0, steps=1, conversations=4)
    assert -1 <= found["baseline_interval"][0] <= found["baseline_mean"] <= found["baseline_interval"][1] <= 1
    assert "after 1 steps of 64 turns" in capsys.readouterr().out
