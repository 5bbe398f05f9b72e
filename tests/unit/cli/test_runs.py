"""`etude runs` and `etude report` on real run directories."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.cli.runs import find_run, print_runs
from etude.errors import EtudeError
from etude.runs.directory import Run
from etude.simulation.results import EpisodeRow, EvaluationResult

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(name: str, loss: float = 0.5) -> Run:
    run = Run(Path("runs") / name)
    run.set_status("running", step=0)
    with run.metrics() as metrics:
        metrics.write(10, {"epoch": 1.0, "train/loss": 2.0, "lr/policy": 1e-3})
        metrics.write(10, {"eval/accuracy": 0.75, "eval/loss": loss})
    run.set_status("finished", step=10)
    return run


def test_runs_are_listed_with_state_step_and_main_metrics(folder: Path) -> None:
    make_run("first")
    make_run("second", loss=math.nan)
    result = runner.invoke(app, ["runs"])
    head, newest, oldest = result.stdout.splitlines()
    assert head.split() == ["run", "state", "step", "metrics", "started", "duration"]
    assert newest.split()[:3] == ["second", "finished", "10"]
    assert "eval/loss 0.5  eval/accuracy 0.75  train/loss 2" in oldest
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("width", [130, 90, 74])
def test_each_run_is_a_line_of_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    run = make_run("quickstart-pick-act")
    rows = tuple(EpisodeRow("reach", "x", n, n, n > 20, 10, 0.0) for n in range(50))
    EvaluationResult(rows, "test", 0).to_json(run.dir / "evaluation/reach-test.json")
    make_run("b")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("etude.cli.output.in_terminal", lambda: True)
    monkeypatch.setattr("etude.cli.runs.in_terminal", lambda: True)
    print_runs(Path("runs"), as_json=False)
    head, _, *lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 2 and max(map(len, lines)) <= width
    assert "success 58.0% (44.2% to 70.6%)" in lines[1], "what leads is never left out"
    assert ("eval/loss" in lines[1], "started" in head, "duration" in head) == (width > 90, width > 90, width > 74)


def test_the_list_leads_with_the_reward_or_with_what_was_evaluated(folder: Path) -> None:
    run = make_run("robot")
    rows = tuple(EpisodeRow("reach", "x", n, n, n > 0, 10, 0.0) for n in range(4))
    EvaluationResult(rows, "test", 0, policy="best checkpoint, step 10").to_json(run.dir / "evaluation/reach-test.json")
    pole = make_run("pole")
    blind = tuple(EpisodeRow("gym:CartPole-v1", "x", n, n, None, 10, 100.0 + n) for n in range(3))
    EvaluationResult(blind, "test", 0).to_json(pole.dir / "evaluation/pole-test.json")
    chat = Run(Path("runs") / "chat")
    chat.set_status("finished", step=5)
    with chat.metrics() as metrics:
        metrics.write(5, {"train/loss": 0.0, "train/clip_fraction": 0.1, "train/reward": 0.75})
    listed = {line.split()[0]: line for line in runner.invoke(app, ["runs"]).stdout.splitlines()}
    assert "  success 75.0% (30.1% to 95.4%)  eval/loss 0.5  eval/accuracy 0.75  " in listed["robot"]
    assert "  reward 101 (98.52 to 103.5)  eval/loss 0.5" in listed["pole"]
    assert "  train/reward 0.75  train/clip_fraction 0.1  train/loss 0  " in listed["chat"]


def test_runs_as_json_are_strict_json(folder: Path) -> None:
    make_run("only", loss=math.inf)
    (run,) = json.loads(runner.invoke(app, ["runs", "--json"]).stdout, parse_constant=pytest.fail)
    assert (run["name"], run["state"], run["step"]) == ("only", "finished", 10)
    assert run["metrics"]["eval/loss"] == "inf"


def test_an_empty_folder_has_no_runs_and_a_missing_one_is_a_mistake(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    assert runner.invoke(app, ["runs", "elsewhere"]).stdout == "no runs under elsewhere\n"
    missing = runner.invoke(app, ["runs"])
    assert isinstance(missing.exception, EtudeError)
    assert "no such folder" in str(missing.exception)


HUGE = "9" * 400
ODD = {
    "null": "null", "list": "[1, 2]", "text": '"finished"', "binary": b"\x00\xff\xfe", "empty": "",
    "deep": "[" * 100_000,
    "types": '{"state": 7, "step": "ten", "started": [], "updated": {}, "duration_s": "long", "pid": -1, "host": 3}',
    "numbers": f'{{"state": "running", "step": {HUGE}, "started": {HUGE}, "duration_s": 1e999, "pid": {HUGE}}}',
    "not a number": '{"state": "finished", "started": NaN, "updated": -Infinity, "duration_s": NaN, "step": 1.5}',
    "escapes": '{"state": "\\u001b[31mred", "error": "\\u001b]0;title\\u0007"}',
}  # fmt: skip


@pytest.mark.parametrize("content", ODD.values(), ids=ODD)
def test_an_odd_status_file_is_marked_and_breaks_neither_the_list_nor_its_report(
    folder: Path, content: str | bytes
) -> None:
    make_run("good")
    odd = folder / "runs" / "odd"
    odd.mkdir()
    (odd / "status.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (odd / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": {HUGE}, "eval/loss": [], "eval/x": "inf"}}\n')
    for command in (["runs"], ["runs", "--json"], ["report", "odd"]):
        result = runner.invoke(app, command)
        assert result.exit_code == 0, (command, result.exception)
        assert "\x1b" not in result.stdout
    listed = runner.invoke(app, ["runs"]).stdout.splitlines()
    assert len(listed) == 3
    assert any(line.startswith("good  finished") for line in listed)
    (marked,) = (line for line in listed if line.startswith("odd"))
    assert marked.split()[1] in ("unreadable", "unknown", "running", "finished", "\\x1b[31mred")


def test_a_status_that_cannot_be_read_is_marked(folder: Path) -> None:
    make_run("good")
    (folder / "runs" / "odd" / "status.json").mkdir(parents=True)
    (folder / "runs" / "lost").mkdir()
    (folder / "runs" / "lost" / "status.json").symlink_to("nowhere")
    (folder / "runs" / "lost" / "metrics.jsonl").mkdir()
    listed = runner.invoke(app, ["runs"]).stdout
    assert sum("unreadable" in line for line in listed.splitlines()) == 2


def test_names_cannot_speak_to_the_terminal(folder: Path) -> None:
    run = make_run("evil\x1b[2J\x07\u202e")
    with run.metrics() as metrics:
        metrics.write(11, {"eval/\x1b[31mred": 1.0})
    for command in (["runs"], ["report", run.name]):
        result = runner.invoke(app, command)
        assert result.exit_code == 0, result.exception
        assert "\x1b" not in result.stdout
        assert r"evil\x1b[2J\x07\u202e" in result.stdout


def test_a_report_is_written_by_name_or_path(folder: Path) -> None:
    run = make_run("first")
    assert runner.invoke(app, ["report", "first"]).stdout == "runs/first/report.html\n"
    result = runner.invoke(app, ["report", str(run.dir.resolve()), "--output", "out/page.html"])
    assert result.stdout == "out/page.html\n"
    assert "eval/accuracy" in Path("out/page.html").read_text()


def test_a_name_means_the_run_and_a_path_means_the_folder(folder: Path) -> None:
    make_run("first")
    (folder / "first").mkdir()
    assert find_run("first") == Path("runs/first")
    assert find_run("./first") == Path("first")
    assert find_run(str(folder / "first")) == folder / "first"
    assert runner.invoke(app, ["report", "first"]).stdout == "runs/first/report.html\n"
    assert not list((folder / "first").iterdir())


def test_no_page_is_written_into_a_folder_that_is_no_run(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "config.yaml").write_text("not: a run\n")
    result = runner.invoke(app, ["report", "src"])
    assert isinstance(result.exception, EtudeError)
    assert "src is not a run" in str(result.exception)
    assert not (folder / "src" / "report.html").exists()


def test_open_shows_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("first")
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    runner.invoke(app, ["report", "first", "--open"])
    assert opened == [(folder / "runs/first/report.html").as_uri()]


def test_a_misspelt_run_is_corrected(folder: Path) -> None:
    make_run("digits-one")
    with pytest.raises(EtudeError, match="did you mean 'digits-one'"):
        find_run("digit-one")
    with pytest.raises(EtudeError, match="etude runs"):
        find_run("zzz")
