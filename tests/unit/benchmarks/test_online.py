"""The benchmark of online training: rows that are valid, made once, and compared with what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import online
from etude.config.schema import ExperimentConfig

ROWS = list(online.suite([0], list(online.TASKS), list(online.METHODS)))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.task}-{row.method}")
def test_every_row_has_a_valid_configuration(row: online.Row) -> None:
    values = row.values(7)
    config = ExperimentConfig(**values, data={"type": "lerobot", "params": {"root": "data"}})  # type: ignore[arg-type]
    assert config.training.training_steps == 7
    if row.method == "start":
        assert config.online is None
        return
    assert config.online is not None and config.online.env == row.env
    assert config.online.label == ("expert" if row.method == "dagger" else "own")


def test_a_row_is_known_by_what_its_outcome_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    row = online.Row("push", "dagger", 0)
    keys = {online.row_key(row, 200, None), online.row_key(row, 100, None), online.row_key(row, 200, 7)}
    keys |= {online.row_key(online.Row("push", "dagger", 1), 200, None), online.row_key(ROWS[0], 200, None)}
    assert len(keys) == 5
    monkeypatch.setattr(online, "CHANGES", {("push", "dagger"): ["online.noise=0.1"]})
    assert online.row_key(row, 200, None) not in keys


def test_rows_are_made_once_and_goals_that_are_missed_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[online.Row] = []

    def run_row(row: online.Row, *_: Any) -> dict[str, Any]:
        made.append(row)
        facts = {"successes": 150, "episodes": 200, "success": 0.75, "interval": [0.69, 0.8], "steps": 9}
        return {**online.asdict(row), **facts, "played": 4, "env_steps": 400, "train_cpu_s": 60.0}

    monkeypatch.setattr(online, "run_row", run_row)
    arguments = ["--tasks", "push", "--methods", "start,dagger", "--seeds", "0,1", "--folder", str(tmp_path)]
    assert online.main(arguments) == 1
    assert [(row.method, row.seed) for row in made] == [("start", 0), ("dagger", 0), ("start", 1), ("dagger", 1)]
    said = capsys.readouterr()
    assert "push, dagger, seed 1: 75.0% in 1.00 CPU minutes; asked for 97% in 3" in said.err and "start" not in said.err
    online.main(arguments)
    assert len(made) == 4 and len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4
    capsys.readouterr()
    assert online.main([*arguments, "--markdown"]) == 0
    assert "| push | dagger | 1 | 150/200 | 75.0% | 69.0% to 80.0% | 9 | 4 | 400 | 1.00 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["method"] == "start"
    online.main(["--tasks", "push", "--minutes", "0", "--folder", str(tmp_path / "none")])
    assert "stopped after 0 minutes" in capsys.readouterr().err


def test_what_learns_without_the_expert_is_held_to_the_start_of_its_seed() -> None:
    def found(method: str, seed: int, success: float, high: float = 0.2) -> dict[str, Any]:
        row = online.asdict(online.Row("push", method, seed))
        return {**row, "success": success, "interval": [0.0, high], "train_cpu_s": 120.0}

    better = [found("start", 0, 0.14), found("self-imitation", 0, 0.21)]
    assert online.missed(better) == []
    worse = [found("start", 1, 0.14, high=0.21), found("self-imitation", 1, 0.21), found("self-imitation", 2, 0.9)]
    assert online.missed([*better, *worse]) == [
        "push, self-imitation, seed 1: 21.0% in 2.00 CPU minutes; asked for more than the start's 21.0% in 30",
        "push, self-imitation, seed 2: make the row of its start to compare it with",
    ]
    assert online.missed([found("self-imitation", 2, 0.9)], [found("start", 2, 0.5)]) == []


@pytest.mark.nightly
def test_a_row_is_trained_and_evaluated(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    found = online.run_row(online.Row("pick-place", "dagger", 0), 2, tmp_path, 3)
    assert found["steps"] == 3 and found["played"] == 4 and found["env_steps"] > 100 and found["episodes"] == 2
