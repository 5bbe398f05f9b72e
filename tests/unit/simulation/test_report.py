"""What evaluations add to the report of a run."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from etude.simulation.report import evaluation_sections, write_run_report
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
    assert table.count("<table ") == 1
    for text in ("a&lt;b", "3/4", "75.0%", "30.1% to 95.4%", "6/8", "seed 5", "1.50 ms"):
        assert text in table
    assert base64.b64encode(b"film of a failure").decode() in films
    assert 'class="films of1"' in films and 'class="tag failure"' in films
    page = write_run_report(tmp_path).read_text()
    assert "Success in simulation" in page
    assert "media-src data:" in page
    assert page.index("Success in 2 environments") < page.index("<dt>Steps")


def test_which_checkpoint_acted_is_said(tmp_path: Path) -> None:
    rows = tuple(EpisodeRow("reach", "x", n, n, True, 10, 0.0) for n in range(4))
    result = EvaluationResult(rows, "test", 5, policy="best checkpoint, step 4000")
    result.to_json(tmp_path / "evaluation/a-test.json")
    page = write_run_report(tmp_path).read_text()
    assert "Evaluated: best checkpoint, step 4000." in page
    assert "51.0% to 100.0%; 4 episodes; best checkpoint, step 4000" in page, "a tile says it too"


def test_rewards_stand_where_there_is_no_notion_of_success(tmp_path: Path) -> None:
    rows = tuple(EpisodeRow("pole", "x", n, n, None, 10, float(n)) for n in range(5))
    EvaluationResult(rows, "test", 5).to_json(tmp_path / "evaluation/a-test.json")
    ((title, table),) = evaluation_sections(tmp_path)
    assert title == "Reward in simulation"
    assert "Mean reward" in table and "%" not in table.replace("95 % interval", "") and "Succeeded" not in table
    assert "Reward in pole" in write_run_report(tmp_path).read_text()


def test_films_of_training_become_a_strip_by_step(tmp_path: Path) -> None:
    for step in range(100, 2100, 100):
        film = tmp_path / f"films/step-{step:08d}/reach-000-{'success' if step > 1000 else 'failure'}.mp4"
        film.parent.mkdir(parents=True)
        film.write_bytes(f"film {step}".encode())
    rows = tuple(EpisodeRow("reach", "x", n, n, n > 0, 10, 0.0) for n in range(4))
    EvaluationResult(rows, "validation", 5).to_json(tmp_path / "evaluation/step-00000100.json")
    checkpoint = tmp_path / "checkpoints/step-00000100"
    checkpoint.mkdir(parents=True)
    ((title, strip),) = evaluation_sections(tmp_path)
    assert title == "Films by step"
    steps = re.findall(r"Step ([\d,]+)", strip)
    assert len(steps) == 8 and (steps[0], steps[-1]) == ("100", "2,000")
    assert "3/4 succeeded" in strip
    assert (strip.count("tag failure"), strip.count("tag success")) == (4, 4)
    assert base64.b64encode(b"film 2000").decode() in strip


def test_films_that_are_gone_or_too_large_are_left_out(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result.to_json(tmp_path / "evaluation/a-test.json")
    (tmp_path / "evaluation/videos/a_b-000-failure.mp4").write_bytes(bytes(3_000_000))
    assert len(evaluation_sections(tmp_path)) == 1
