"""The table of success rates: which rows there are, that they are kept, and that one is made from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import robot
from benchmarks.robot_lerobot import read_arrays
from etude.config.load import load
from etude.reading import yaml12

FOUND = {
    "label": "reach", "tasks": ["reach"], "policy": "act", "demos": 50, "seed": 0, "successes": 150, "episodes": 200,
    "success": 0.75, "interval": [0.685, 0.805], "steps": 10, "train_s": 90.0, "train_cpu_s": 60.0,
    "per_task": {"metaworld/reach": [150, 200]},
}  # fmt: skip


def test_the_full_suite_has_what_is_promised() -> None:
    rows = list(robot.suite("full", 0, lerobot=True))
    assert len(rows) == len(set(rows))
    for policy in ("act", "diffusion", "flow"):
        single = {row.tasks[0] for row in rows if row.policy == policy and row.demos == 50 and len(row.tasks) == 1}
        assert len(single - {"pusht"}) >= 10
        for demos in (5, 10):
            assert robot.Row(("pick-place",), policy, demos, 0) in rows
            assert robot.Row(("pick-place",), robot.FEW, demos, 0) in rows
    for policy in robot.COMPONENTS:
        tasks = {row.tasks[0] for row in rows if row.policy == policy and row.demos == 50}
        assert len(tasks) == 3 and "drawer-open" in tasks
    assert {row.label for row in rows} > {"pusht", "drawer-open (corner2)", "drawer-open (blind)", "10 tasks"}
    for task, cameras in robot.IMAGE_TASKS.items():
        seen = [row.cameras for row in rows if row.tasks == (task,) and row.state == "hand"]
        assert seen == [cameras, ()], "every task that is learned from pictures has its blind control"
    assert [row for row in rows if row.policy == robot.LEROBOT]
    assert not [row for row in robot.suite("full", 0, lerobot=False) if row.policy == robot.LEROBOT]


@pytest.mark.parametrize("row", list(robot.suite("full", 0, lerobot=True)), ids=lambda row: f"{row.label}-{row.policy}")
def test_every_row_has_a_valid_configuration(row: robot.Row, tmp_path: Path) -> None:
    path = tmp_path / "row.yaml"
    path.write_text(yaml12.write(row.config("data", None)))
    load(path)


def test_a_row_is_known_by_all_that_its_outcome_depends_on() -> None:
    row = robot.Row(("reach",), "act", 50, 0)
    keys = {robot.row_key(row, 200, None), robot.row_key(row, 100, None), robot.row_key(row, 200, 7)}
    keys |= {robot.row_key(robot.Row(("reach",), "act", 50, 1), 200, None)}
    keys |= {robot.row_key(robot.Row(("reach",), "act", 50, 0, (), "hand"), 200, None)}
    assert len(keys) == 5


def test_demonstrations_of_pusht_are_disturbed_and_the_row_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.simulation.record import Noise

    row = robot.Row(("pusht",), "mlp", 5, 0)
    assert Noise(**row.noise).scale > 0 and not robot.Row(("reach",), "act", 5, 0).noise
    before = robot.row_key(row, 200, None)
    monkeypatch.setattr(robot, "PUSHT_NOISE", {})
    assert robot.row_key(row, 200, None) != before


def test_rows_are_made_once_and_printed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[robot.Row] = []

    def run_row(row: robot.Row, *_: Any) -> dict[str, Any]:
        made.append(row)
        return {**FOUND, "label": row.label}

    monkeypatch.setattr(robot, "run_row", run_row)
    arguments = ["--tasks", "pick-place,reach", "--policies", "act", "--folder", str(tmp_path)]
    robot.main(arguments)
    first = capsys.readouterr().out
    robot.main(arguments)
    assert (len(made), capsys.readouterr().out) == (2, first)
    assert first.splitlines()[2].split()[:6] == ["reach", "act", "50", "0", "150/200", "75.0%"]
    robot.main(["--markdown", "--folder", str(tmp_path)])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4
    assert table[-1] == "| reach | act | 50 | 0 | 150/200 | 75.0% | 68.5% to 80.5% | 10 | 1.00 |"


def test_labels_choose_rows_of_the_suite() -> None:
    given = robot.parse(["--suite", "full", "--labels", "pusht,drawer-open (corner2)", "--policies", "act"])
    assert [row.label for row in robot.choose_rows(given)] == ["pusht", "drawer-open (corner2)"]


def test_several_tasks_are_listed_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    several = {**FOUND, "label": "2 tasks", "tasks": ["reach", "push"]}
    several["per_task"] = {"metaworld/reach": [3, 4], "metaworld/push": [2, 4]}
    robot.print_markdown([several])
    assert capsys.readouterr().out.splitlines()[-2:] == ["| reach | 3/4 |", "| push | 2/4 |"]


def test_no_time_begins_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot.main(["--tasks", "reach", "--minutes", "0", "--folder", str(tmp_path)])
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.slow
def test_a_row_from_demonstrations_to_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("metaworld")
    pytest.importorskip("pyarrow")
    given = ["--tasks", "reach", "--policies", "mlp", "--demos", "3", "--episodes", "2", "--steps", "20"]
    robot.main([*given, "--workers", "0", "--folder", str(tmp_path)])
    (line,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (line["episodes"], line["steps"], line["label"]) == (2, 20, "reach")
    assert 0 <= line["interval"][0] <= line["success"] <= line["interval"][1] <= 1
    assert line["train_cpu_s"] > 0
    assert "reach" in capsys.readouterr().out


def test_arrays_for_lerobot_know_where_episodes_end(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from etude.data import LeRobotWriter

    features = {name: {"dtype": "float32", "shape": (2,)} for name in ("observation.state", "action")}
    with LeRobotWriter(tmp_path / "d", features, fps=10) as writer:
        for length in (3, 2):
            for step in range(length):
                numbers = np.full(2, step, np.float32)
                writer.add_frame({"observation.state": numbers, "action": -numbers})
            writer.save_episode("x")
    state, action, last = read_arrays(tmp_path / "d")
    assert state[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert np.array_equal(action, -state)
    assert last.tolist() == [2, 2, 2, 4, 4]
