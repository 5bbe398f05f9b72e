"""`etude compare`: groups of seeds, what differs, and which differences are real."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude.cli.looking import find_runs
from etude.cli.main import app
from etude.errors import ConfigError, EtudeError
from etude.reading import yaml12
from etude.runs.charts import Series
from etude.runs.compare import compare_runs, render_comparison
from etude.runs.directory import Run
from etude.runs.groups import differing_settings, merge_curves, read_groups
from etude.simulation.results import EpisodeRow, EvaluationResult
from tests.unit.runs.strict_page import Page

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(name: str, seed: int = 0, lr: float = 1e-3, end: float = 0.5, points: int = 20, **extra: Any) -> Path:
    run = Run(Path("runs") / name)
    run.dir.mkdir(parents=True)
    config = {"policy": {"type": "mlp", "params": {"hidden": [64]}}, "training": {"lr": lr, "seed": seed}, **extra}
    (run.dir / "config.yaml").write_text(yaml12.write({**config, "run": {"name": name}}))
    run.set_status("running", step=0, parameters=1234)
    noise = random.Random(f"{name}{seed}")
    with run.metrics() as metrics:
        for step in range(1, points + 1):
            share = step / points
            metrics.write(step * 10, {"train/loss": 2.0 - share + noise.uniform(-0.05, 0.05), "lr/policy": lr})
            if step % 5 == 0:
                metrics.write(step * 10, {"eval/loss": 1.0 + (end - 1.0) * share})
    run.set_status("finished", step=points * 10)
    return run.dir


def add_evaluation(run: Path, successes: int, of: int = 50, env: str = "reach") -> None:
    rows = tuple(EpisodeRow(env, "reach it", n, n, n < successes, 10, float(n)) for n in range(of))
    EvaluationResult(rows, "test", 0).to_json(run / f"evaluation/{env}-test.json")


def test_runs_that_differ_in_their_seed_only_are_a_group(folder: Path) -> None:
    for seed in range(3):
        make_run(f"base-seed{seed}", seed)
        make_run(f"fast-{seed}", seed, lr=1e-2)
    groups = read_groups(find_runs(["base-*", "fast-*"]))
    assert [(group.name, [member.seed for member in group.members]) for group in groups] == [
        ("base", [0, 1, 2]), ("fast", [0, 1, 2]),
    ]  # fmt: skip
    assert differing_settings(groups) == ["training.lr"]


def test_a_name_that_ends_in_digits_stays_whole(folder: Path) -> None:
    make_run("lr-1e-3", 0)
    make_run("lr-1e-3-2", 1)
    (group,) = read_groups(find_runs(["lr-*"]))
    assert group.name == "lr-1e-3"


def test_the_curve_of_a_group_is_its_mean_with_a_band() -> None:
    merged = merge_curves("a", [Series("x", [0, 2], [0.0, 2.0]), Series("y", [0, 1, 2, 3], [1.0, 1.0, 3.0, 5.0])])
    assert list(merged.steps) == [0, 1, 2, 3]
    assert list(merged.values) == [0.5, 1.0, 2.5, 5.0], "the last of those that came so far"
    assert (list(merged.low), list(merged.high)) == ([0.0, 1.0, 2.0, 5.0], [1.0, 1.0, 3.0, 5.0])


def test_the_table_and_the_page_say_which_difference_is_real(folder: Path) -> None:
    for seed, jitter in enumerate((-0.02, 0.0, 0.01, 0.02)):
        make_run(f"base-{seed}", seed, end=0.5 + jitter)
        make_run(f"good-{seed}", seed, lr=1e-2, end=0.3 + jitter)
        make_run(f"same-{seed}", seed, lr=3e-3, end=0.502 - jitter)
    result = runner.invoke(app, ["compare", "base-*", "good-*", "same-*"])
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["runs", "seeds", "eval/loss", "95", "%", "interval", "steps", "duration"]
    assert lines[1].split()[:3] == ["base", "4", "0.505"], "the middle two of 0.48, 0.5, 0.51, 0.52"
    assert "differs: training.lr: 0.001, 0.01, 0.003" in lines
    (good,) = (line for line in lines if line.startswith("good against base: "))
    (same,) = (line for line in lines if line.startswith("same against base: "))
    assert good.endswith(", better") and good.startswith("good against base: -0.2 (")
    assert same.endswith("not a difference: the interval includes 0")
    page = Path("runs/compare.html").read_text()
    text = " ".join(Page(page).text)
    assert "not a difference: the interval includes 0" in text and "beats it with probability 1.00" in text
    assert page.count('class="band"') >= 6, "three groups in two metrics"
    assert not re.search(r"https?:|url\(|@import", page)


def test_success_in_simulation_leads_where_all_runs_have_it(folder: Path) -> None:
    for name, successes in (("a", 45), ("b", 10), ("c", 44)):
        add_evaluation(make_run(name, lr={"a": 1.0, "b": 2.0, "c": 3.0}[name]), successes)
    result = runner.invoke(app, ["compare", "a", "b", "c", "--json"])
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["metric"]["title"] == "success"
    a, b, c = found["groups"]
    assert (a["score"], b["difference"]) == (0.9, pytest.approx(-0.7))
    assert a["interval"] == pytest.approx([0.786, 0.957], abs=0.001), "Wilson's, over its episodes"
    assert (b["is_real"], c["is_real"]) == (True, False)
    assert b["verdict"].startswith("worse") and "other seeds" in b["verdict"]
    assert c["difference_interval"][0] < 0 < c["difference_interval"][1]
    add_evaluation(make_run("d"), 45, env="elsewhere")
    assert compare_runs(find_runs(["a", "d"])).yardstick.title == "eval/loss", "other environments do not compare"


def test_losses_of_other_policies_and_algorithms_are_not_ranked(folder: Path) -> None:
    for seed in range(3):
        make_run(f"act-{seed}", seed, policy={"type": "act"})
        make_run(f"wide-{seed}", seed, policy={"type": "act"}, lr=1e-2, end=0.1)
        make_run(f"mlp-{seed}", seed, end=0.1)
        make_run(f"own-{seed}", seed, end=0.1, policy={"type": "act"}, algorithm={"type": "bc", "params": {"a": 1}})
    result = runner.invoke(app, ["compare", "act-*", "wide-*", "mlp-*", "own-*"])
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert next(line for line in lines if line.startswith("wide against act: ")).endswith(", better"), "of one kind"
    assert "mlp against act: not ranked: another loss (policy.type is mlp, not act)" in lines
    assert "own against act: not ranked: another loss (algorithm.type is bc, not nothing)" in lines
    assert sum("minimise different losses" in line for line in lines) == 1
    text = " ".join(Page(Path("runs/compare.html").read_text()).text)
    assert "minimise different losses" in text and "of which less is better" not in text
    for name in ("act-0", "mlp-0"):
        with Run(Path("runs") / name).metrics() as metrics:
            metrics.write(900, {"eval/accuracy": 0.5, "train/kl": 0.1})
    found = compare_runs(find_runs(["act-0", "mlp-0"]))
    assert (found.yardstick.title, found.yardstick.note) == ("eval/accuracy", ""), "what can be ranked goes first"
    asked = compare_runs(find_runs(["act-0", "mlp-0"]), "train/loss")
    assert asked.standings[1].verdict.startswith("not ranked: another loss"), "nor where it is asked for"


def test_few_seeds_are_not_judged(folder: Path) -> None:
    for seed in range(2):
        make_run(f"base-{seed}", seed)
        make_run(f"fast-{seed}", seed, lr=1e-2, end=0.1)
    _, fast = compare_runs(find_runs(["base-*", "fast-*"])).standings
    assert fast.verdict == "too few seeds to tell (2 and 2, of 3 each)" and not fast.is_real
    _, one = compare_runs(find_runs(["base-0", "fast-0"])).standings
    assert one.verdict == "one run each: nothing tells a difference from chance"


def test_three_seeds_that_may_be_chance_are_no_difference_yet(folder: Path) -> None:
    """All of ours beat all of theirs, which three draws of one distribution do in one case of ten on either side."""
    for seed, jitter in enumerate((0.0, 0.02, 0.1)):
        make_run(f"base-{seed}", seed, end=0.5 + jitter)
        make_run(f"near-{seed}", seed, lr=1e-2, end=0.4 + jitter / 2)
        make_run(f"far-{seed}", seed, lr=1e-1, end=0.1 + jitter)
    _, near, far = compare_runs(find_runs(["base-*", "near-*", "far-*"])).standings
    assert near.difference_interval is not None and near.difference_interval[1] < 0
    assert (near.is_real, far.is_real, far.verdict) == (False, True, "better")
    assert near.verdict == "not a difference yet: Student's interval, which suits 3 seeds better, includes 0"


def test_an_evaluation_that_all_runs_have_is_found_among_others(folder: Path) -> None:
    for name, lr, found in (("a", 1.0, {"push": 5, "reach": 40}), ("b", 2.0, {"push": 30}), ("c", 3.0, {"push": 10})):
        run = make_run(name, lr=lr)
        for age, (env, successes) in enumerate(found.items()):
            add_evaluation(run, successes, env=env)
            os.utime(run / f"evaluation/{env}-test.json", (1e9 + age, 1e9 + age))
    comparison = compare_runs(find_runs(["a", "b", "c"]))
    assert [standing.score for standing in comparison.standings] == [0.1, 0.6, 0.2]
    assert comparison.standings[0].interval == pytest.approx([0.043, 0.214], abs=0.001)
    printed = runner.invoke(app, ["compare", "a", "b", "c"]).stdout
    assert "success: Found by `etude evaluate` in push on the test split." in printed


def test_a_folder_with_signs_of_a_pattern_in_its_name_is_meant_by_it(folder: Path) -> None:
    paths = [make_run("lr[1]"), make_run("lr1", lr=2.0)]
    assert find_runs(["lr[1]", "lr1"]) == paths


def test_copies_of_a_run_are_one_seed(folder: Path) -> None:
    for copy in range(3):
        make_run(f"slow-{copy}", end=0.6)
        make_run(f"fast-{copy}", lr=1e-2, end=0.5)
    printed = runner.invoke(app, ["compare", "slow-*", "fast-*"], catch_exceptions=False).stdout
    assert "one run each: nothing tells a difference from chance" in printed
    assert re.search(r"^slow +1 +0.6 +- ", printed, re.MULTILINE)
    drawn = [make_run(f"drawn-{seed}", data={"params": {"seed": seed}}) for seed in range(3)]
    assert read_groups(drawn)[0].seeds == 3


def test_groups_of_one_name_are_told_apart_by_their_place(folder: Path) -> None:
    paths = [make_run(f"{place}/mine", lr=lr) for place, lr in (("a", 1e-3), ("b", 1e-2), ("c", 1e-1))]
    assert [group.name for group in read_groups(paths)] == ["mine", "runs/b/mine", "runs/c/mine"]


def test_mistakes_are_one_sentence(folder: Path) -> None:
    make_run("base")
    make_run("other", lr=1.0)
    (folder / "runs/plain").mkdir()
    for arguments, sentence in [
        (["base"], "compare takes two runs or more"),
        (["base", "base", "./runs/base"], "compare takes two runs or more"),
        (["bse", "other"], "did you mean 'base'"),
        (["none-*"], "no run matches 'none-\\*'"),
        (["base", "plain"], "runs/plain is not a run"),
    ]:
        error = runner.invoke(app, ["compare", *arguments]).exception
        assert isinstance(error, EtudeError), arguments
        assert re.search(sentence, str(error)), error
    error = runner.invoke(app, ["compare", "base", "other", "--metric", "eval/acc"]).exception
    assert isinstance(error, ConfigError) and "there are eval/loss" in str(error)


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}</style>"


def test_names_settings_and_metrics_cannot_speak_to_the_page(folder: Path) -> None:
    paths = [make_run(f"run{mark}{EVIL.replace('/', '_')}", extra={EVIL: EVIL + mark}) for mark in "ab"]
    for path in paths:
        with Run(path).metrics() as metrics:
            metrics.write(900, {f"train/{EVIL}": 1.0})
        add_evaluation(path, 3, env=EVIL.replace("/", "_"))
    for metric in (None, f"train/{EVIL}"):
        html = render_comparison(compare_runs(paths, metric))
        page = Page(html)
        assert html.count("<script") == 1 and html.count("<style") == 2 and "<img" not in html
        assert "{{7*7}}" in " ".join(page.text) and not any(
            name.startswith("on") for _, given in page.tags for name in given
        )


@pytest.mark.slow
def test_a_hundred_runs_make_a_page_of_a_few_megabytes(folder: Path) -> None:
    paths = [make_run(f"run-{number}", lr=1e-3 * (number + 1), points=100) for number in range(100)]
    began = time.process_time()
    html = render_comparison(compare_runs(paths))
    assert time.process_time() - began < 20, "2 s are usual"
    assert len(html) < 4_000_000
    assert html.count('class="line') > 200


def test_comparing_imports_no_torch() -> None:
    code = "import sys, etude.cli.looking, etude.runs.compare; sys.exit(bool({'torch', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0
