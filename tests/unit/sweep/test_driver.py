"""A sweep under way: what is tried, given up, recorded as failed, and gone on with after an end of any kind."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.errors import EtudeError
from etude.runs.directory import Run
from etude.sweep.driver import SweepDriver, SweepPlan, show_values
from etude.sweep.objective import Objective
from etude.sweep.plan import SweepFolder
from etude.sweep.processes import OUTPUT, TrainingProcess, run_queue
from etude.sweep.space import parse_space
from etude.sweep.study import TrialRecord, TrialStudy
from tests.unit.runs.strict_page import Page

STAND_IN = Path(__file__).with_name("stand_in.py")
NEVER = SimpleNamespace(received=0)
LOSS = Objective("eval/loss", is_large=False)
HARMLESS = ("training.lr=log(1e-5,1e-2)", "training.batch_size=8,16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("etude.sweep.processes.LAUNCHER", (str(STAND_IN),))
    monkeypatch.setattr("etude.sweep.processes.LOOK_EVERY_S", 0.01)
    return tmp_path


def make_driver(
    texts: Sequence[str] = HARMLESS, *, trials: int = 3, name: str = "s", objective: Objective = LOSS,
    sampler: str = "tpe", pruner: str = "none", seed: int = 0, jobs: int = 1,
) -> tuple[SweepDriver, list[str]]:  # fmt: skip
    space, said = parse_space(texts), list[str]()
    place = SweepFolder(Path("runs"), name)
    place.folder.mkdir(parents=True, exist_ok=True)
    plan = SweepPlan("x.yaml", place, space, objective, trials, jobs, sampler, pruner, seed)
    study = TrialStudy(
        place.folder, space, objective, sampler=sampler, pruner=pruner, seed=seed, jobs=jobs, cadence=(10, 40)
    )
    return SweepDriver(plan, study, said.append), said


@pytest.mark.slow
def test_a_sweep_tries_records_and_says_what_it_found() -> None:
    driver, said = make_driver(trials=3)
    assert run_queue(driver, 1, NEVER) == "finished"
    records = driver.study.records()
    assert [one.state for one in records] == ["finished"] * 3
    values = [one.value for one in records if one.value is not None]
    best = driver.study.best()
    assert best is not None and best.value == min(values)
    assert [line.split("  ")[0] for line in said] == ["trial 0 (1/3)", "trial 1 (2/3)", "trial 2 (3/3)"]
    assert "ETA" in said[0] and "lr=" in said[0] and "batch_size=" in said[0] and "ETA" not in said[2]
    assert driver.plan.command_again(dict(best.values)).startswith("etude train x.yaml training.lr=")
    page = Page((Path("runs/s") / "sweep.html").read_text())
    assert "trial-0002/report.html" in page.attributes("href")
    assert (Path("runs/s/trial-0002/report.html")).is_file()


@pytest.mark.slow
def test_a_grid_tries_what_another_sampler_has_left_of_it() -> None:
    grid = ["training.lr=1e-3,1e-4", "training.batch_size=8,16", "training.weight_decay=range(0,0.3,0.1)"]
    before, _ = make_driver(grid, trials=5, sampler="random")
    run_queue(before, 1, NEVER)
    found = {tuple(one.values.values()) for one in before.study.records()}
    driver, _ = make_driver(grid, trials=99, sampler="grid")
    size = driver.study.grid_size
    assert run_queue(driver, 1, NEVER) == "finished"
    records = driver.study.records()
    assert len(records) == size == 5 + 16 - len(found)
    assert len({tuple(one.values.values()) for one in records}) == 16


@pytest.mark.slow
def test_the_same_seed_suggests_the_same_trials_also_after_a_stop() -> None:
    whole, _ = make_driver(trials=4, name="whole")
    run_queue(whole, 1, NEVER)
    for trials in (2, 4):  # ended after two, and extended
        halves, _ = make_driver(trials=trials, name="halves")
        run_queue(halves, 1, NEVER)
    other, _ = make_driver(trials=1, name="other", seed=1)
    run_queue(other, 1, NEVER)
    assert [one.values for one in halves.study.records()] == [one.values for one in whole.study.records()]
    assert other.study.records()[0].values != whole.study.records()[0].values


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_was_running_goes_on_in_its_own_run_with_its_values(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_HOLDS", "trial-0001")
    first, _ = make_driver(trials=3, jobs=jobs)

    class WhenItRuns:
        @property
        def received(self) -> int:
            return int(Run("runs/s/trial-0001").metrics_path.exists() and (jobs == 1 or len(first.running) == 1))

    assert run_queue(first, jobs, WhenItRuns()) == "interrupted"
    before = first.study.records()
    assert before[1].state == "running"
    assert Run("runs/s/trial-0001").status()["state"] == "interrupted", "it was asked, and saved"
    with Path("runs/s/journal.log").open("ab") as journal:
        journal.write(b'{"op_code": 4, "worker')  # torn by a kill
    monkeypatch.delenv("STAND_IN_HOLDS")
    second, said = make_driver(trials=3, jobs=jobs)
    assert run_queue(second, jobs, NEVER) == "finished"
    after = second.study.records()
    assert [one.state for one in after] == ["finished"] * 3
    assert [one.values for one in after][: len(before)] == [one.values for one in before]
    words = Path("runs/s/trial-0001", OUTPUT).read_text().splitlines()
    assert words == ["begins after step 0", "begins after step 10"]
    assert len(said) == 3 - sum(one.state == "finished" for one in before), "what had finished is not repeated"


@pytest.mark.slow
def test_hopeless_trials_are_given_up_saved_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five good ones, after which a median pruner begins; then one that is worse at its first evaluation.
    good = ",".join(f"{rate}e-3" for rate in (1, 2, 3, 4, 5))
    driver, said = make_driver([f"training.lr={good},1e-5"], trials=6, sampler="grid", pruner="median")
    monkeypatch.setenv("STAND_IN_HOLDS", "trial-0005")
    assert run_queue(driver, 1, NEVER) == "finished"
    last = driver.study.records()[-1]
    assert (last.state, last.step) == ("pruned", 10)
    assert last.value == pytest.approx(2.1)
    assert Run("runs/s/trial-0005").status()["state"] == "interrupted"
    assert "(pruned at step 10)" in said[-1]
    best = driver.study.best()
    assert best is not None and best.values == {"training.lr": "1e-3"}


def test_a_trial_that_fails_is_recorded_and_the_sweep_goes_on() -> None:
    driver, said = make_driver(["training.lr=0.1,1e-3,0.2"], sampler="grid")
    assert run_queue(driver, 1, NEVER) == "finished"
    records = driver.study.records()
    assert [one.state for one in records] == ["failed", "finished", "failed"]
    assert records[0].error == "the loss is nan at step 10; lower training.lr"
    assert "failed: the loss is nan at step 10; lower training.lr" in said[0]
    assert "the loss is nan" in Path("runs/s/sweep.html").read_text()
    driver.require_success()


def test_three_first_failures_alike_end_the_sweep_with_their_sentence() -> None:
    driver, said = make_driver(["training.lr=uniform(0.1,1)"], trials=10)
    with pytest.raises(EtudeError, match="first 3 trials failed alike, and the sweep was stopped: the loss is nan"):
        run_queue(driver, 1, NEVER)
    assert len(said) == 3


def test_a_sweep_of_failures_does_not_end_well() -> None:
    driver, _ = make_driver(["training.lr=0.1,0.2"], trials=2, sampler="grid")
    assert run_queue(driver, 1, NEVER) == "finished"
    with pytest.raises(EtudeError, match="all 2 trials failed, the last one so: the loss is nan"):
        driver.require_success()


def test_a_metric_that_no_trial_logs_is_named_with_those_that_there_are() -> None:
    driver, said = make_driver(trials=3, objective=Objective("eval/success", is_large=True))
    told = "trial 0: it never logged eval/success, but eval/loss, train/loss; choose with --metric"
    with pytest.raises(EtudeError, match=told):
        run_queue(driver, 1, NEVER)
    assert len(said) == 1, "every other would fail alike"


def test_a_process_that_dies_says_what_ended_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (folder / "talks.py").write_text("print('some words')\nraise SystemExit(3)\n")
    for program, says in (("dies.py", "killed by SIGKILL"), ("talks.py", "exit code 3: some words")):
        monkeypatch.setattr("etude.sweep.processes.LAUNCHER", (str(folder / program),))
        process = TrainingProcess(folder / program.removesuffix(".py"), [])
        process.start()
        while process.poll() is None:
            time.sleep(0.01)
        assert process.complaint() == says


def test_a_deadline_leaves_what_runs_to_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_HOLDS", "trial-0000")
    driver, _ = make_driver()
    assert run_queue(driver, 1, NEVER, deadline_s=0.0) == "timeout"
    assert [one.state for one in driver.study.records()] == ["running"]


def test_values_are_shown_with_the_last_word_of_their_key() -> None:
    space = parse_space(["training.lr=1,2", "policy.params.hidden.0=32,64", "a.every=1,2", "b.every=3,4"])
    record = TrialRecord(
        0, "finished", {"training.lr": "1", "policy.params.hidden.0": "32", "a.every": "2", "b.every": "3"}
    )
    assert show_values(record, space) == "lr=1 hidden.0=32 a.every=2 b.every=3"


def test_the_journal_holds_no_pickle() -> None:
    driver, _ = make_driver(trials=1)
    run_queue(driver, 1, NEVER)
    for line in Path("runs/s/journal.log").read_text().splitlines():
        json.loads(line)
