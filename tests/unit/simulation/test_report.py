"""What evaluations add to the report of a run."""

from __future__ import annotations

import base64
from pathlib import Path

from etude.runs.report import write_report
from etude.simulation.report import evaluation_sections
from etude.simulation.results import EpisodeRow, EvaluationResult


def make_result(tmp_path: Path) -> EvaluationResult:
    rows = tuple(EpisodeRow(env, "x", n, n, n > 0, 10, 0.0) for env in ("a<b", "c") for n in range(4))
    film = tmp_path / "evaluation/videos/a_b-000-failure.mp4"
    film.parent.mkdir(parents=True)
    film.write_bytes(b"film of a failure")
    timing = {"policy_ms_mean": 1.5, "policy_ms_p99": 3.0}
    return EvaluationResult(rows, "test", 5, timing, (Path("elsewhere") / film.name,))


def test_a_run_without_evaluations_gets_no_section(tmp_path: Path) -> None:
    assert evaluation_sections(tmp_path) == []


def test_rates_intervals_and_films_are_shown(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result.to_json(tmp_path / "evaluation/a-test.json")
    result.to_json(tmp_path / "evaluation/step-00000010.json")  # of a callback
    (tmp_path / "evaluation/broken.json").write_text("{")
    (_, table), (_, films) = evaluation_sections(tmp_path)
    assert table.count("<table>") == 1
    for text in ("a&lt;b", "3/4", "75.0%", "30.1% to 95.4%", "6/8", "seed 5", "1.50 ms"):
        assert text in table
    assert base64.b64encode(b"film of a failure").decode() in films
    page = write_report(tmp_path, extra_sections=evaluation_sections(tmp_path)).read_text()
    assert "Success in simulation" in page
    assert "media-src data:" in page


def test_films_that_are_gone_or_too_large_are_left_out(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result.to_json(tmp_path / "evaluation/a-test.json")
    (tmp_path / "evaluation/videos/a_b-000-failure.mp4").write_bytes(bytes(3_000_000))
    assert len(evaluation_sections(tmp_path)) == 1
