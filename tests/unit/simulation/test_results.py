"""Success rates with intervals, tables and files."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from etude.simulation.evaluate import choose_for_film, film_name
from etude.simulation.results import (
    EpisodeRow,
    EvaluationResult,
    Rate,
    mean_interval,
    student_quantile,
    wilson_interval,
)


def row(env: str, episode: int, success: bool) -> EpisodeRow:
    return EpisodeRow(env, f"do {env}", episode, 7 + episode, success, 10 * (episode + 1), 0.5)


RESULT = EvaluationResult(
    (row("a", 0, True), row("a", 1, False), row("b", 0, True), row("b", 1, True)),
    "test", 3, {"seconds": 1.0}, (Path("videos/x.mp4"),),
)  # fmt: skip


@pytest.mark.parametrize(
    "successes, trials, low, high",
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (95, 100, 0.8882, 0.9785), (0, 0, 0.0, 1.0)],
)
def test_wilsons_interval_has_its_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("freedom, quantile", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (199, 1.9720)])
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=0.006)


def test_an_environment_without_a_notion_of_success_is_told_by_its_reward() -> None:
    rows = tuple(EpisodeRow("pole", "balance", n, n, None, 10, float(n)) for n in range(1, 6))
    result = EvaluationResult(rows, "test", 0)
    assert result.metrics() == {"steps": 10.0, "reward": 3.0}
    assert result.total.reward_interval == pytest.approx((1.0368, 4.9632), abs=0.001), "3 -+ 2.7764 * 1.5811 / sqrt(5)"
    assert str(result.total) == "mean reward 3 of 5 episodes (95 % interval 1.037 to 4.963)"
    told = json.loads(result.to_json())
    assert told["success"] is told["interval"] is told["successes"] is None
    assert EvaluationResult.from_dict(told) == result
    assert film_name(rows[0]) == "pole-001-episode.mp4"
    assert mean_interval([1.0]) is mean_interval([1.0, float("inf")]) is None


def test_impossible_counts_are_refused() -> None:
    for counts in ((3, 2), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="cannot be"):
            wilson_interval(*counts)


def test_rates_are_given_for_each_task_and_for_all() -> None:
    assert [(rate.name, rate.successes, rate.episodes) for rate in RESULT.tasks] == [("a", 1, 2), ("b", 2, 2)]
    assert RESULT.success == 0.75
    assert RESULT.metrics() == {"success": 0.75, "steps": 15.0, "reward": 0.5, "success_a": 0.5, "success_b": 1.0}
    assert str(RESULT.total) == "3/4 = 75.0% (95 % interval 30.1% to 95.4%)"
    assert Rate.of("none", ()).success == 0.0


def test_json_and_csv_hold_every_episode(tmp_path: Path) -> None:
    text = RESULT.to_json(tmp_path / "deep" / "r.json")
    assert (tmp_path / "deep" / "r.json").read_text() == text
    assert json.loads(text)["interval"] == list(RESULT.interval)
    assert EvaluationResult.from_dict(json.loads(text)) == RESULT
    rows = list(csv.DictReader(io.StringIO(RESULT.to_csv(tmp_path / "r.csv"))))
    assert [(line["env"], line["success"], line["steps"]) for line in rows] == [
        ("a", "1", "10"), ("a", "0", "20"), ("b", "1", "10"), ("b", "1", "20"),
    ]  # fmt: skip


def test_results_compare_by_their_episodes_not_by_how_long_they_took() -> None:
    assert EvaluationResult(RESULT.rows, "test", 3) == RESULT
    assert EvaluationResult(RESULT.rows[:3], "test", 3) != RESULT


def test_failures_are_filmed_first_and_tasks_take_turns() -> None:
    chosen = choose_for_film(RESULT.rows, 3)
    assert [(one.env, one.episode) for one in chosen] == [("a", 1), ("a", 0), ("b", 0)]
    assert len(choose_for_film(RESULT.rows, 99)) == 4
    assert film_name(row("metaworld/x:y", 3, False)) == "metaworld_x_y-003-failure.mp4"
