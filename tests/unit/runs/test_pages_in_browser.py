"""Pages in a real Chromium: wide and phone-sized, light and dark, live, and deaf to what texts would have them do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.reading import yaml12
from etude.redteam.evaluator import ASTEvaluator
from etude.runs.compare import compare_runs, write_comparison
from etude.runs.directory import Run
from etude.runs.watch import RunWatch, make_server
from etude.simulation.report import evaluation_sections, write_run_report
from etude.simulation.results import EpisodeRow, EvaluationResult, film_name
from etude.sweep.objective import Objective
from etude.sweep.page import write_page
from etude.sweep.space import parse_space
from etude.sweep.study import TrialStudy
from tests.browser import Browser, browsing
from tests.served import ServedPages
from tests.unit.simulation.made_up import made_up_result

pytestmark = pytest.mark.slow
EVIL = "<img src=x onerror='document.title=666'><script>document.title=666</script>\"'&"
# What is wider than the window and does not scroll by itself: what a phone would cut.
CUT = """const root = document.documentElement, width = root.clientWidth;
  return [...document.querySelectorAll("body *")].filter(one => !one.closest("svg, .panel, .filmstrip, pre")
  && one.getBoundingClientRect().right > width + 1).map(one => one.tagName + "." + one.className)
  .concat(root.scrollWidth > width ? ["text, " + root.scrollWidth + " wide"] : [])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


LONG = f"/home/{'a_path_without_a_space_' * 8}.yaml"


def make_run(directory: Path, lr: float = 1e-3, seed: int = 0) -> Run:
    run = Run(directory)
    run.dir.mkdir(parents=True)
    training = {"lr": lr, "seed": seed, "note": EVIL}
    run.config_path.write_text(yaml12.write({"policy": {"type": "mlp"}, "training": training}))
    run.set_status("running", step=0, parameters=1_234_567, warnings=[EVIL, LONG])
    with run.metrics() as metrics:
        for step in range(1, 41):
            metrics.write(step * 10, {"train/loss": math.exp(-lr * 100 * step), f"train/{EVIL}": 1.0 / step})
            metrics.write(step * 10, {"train/kl": 1.2e-5 + 1e-8 * step})
            if step % 10 == 0:
                metrics.write(step * 10, {"eval/loss": math.exp(-lr * 90 * step) + seed * 1e-3})
    rows = tuple(EpisodeRow(f"metaworld/{EVIL}", EVIL, n, n, n > 9, 10, 0.0) for n in range(50))
    EvaluationResult(rows, "test", 0, policy="best checkpoint, step 400").to_json(run.dir / "evaluation/a-test.json")
    return run


def test_a_report_is_whole_on_a_phone_and_in_the_dark(browser: Browser, tmp_path: Path) -> None:
    page = write_run_report(make_run(tmp_path / f"run {EVIL.replace('/', '_')}").dir)
    browser.open(page.as_uri())
    for width, height in ((1280, 900), (390, 844)):
        browser.resize(width, height)
        assert browser.run(CUT) == []
        assert "80.0%" in browser.text("dl.tiles") and "best checkpoint, step 400" in browser.text("dl.tiles")
        interval = "[...document.querySelectorAll('.rates td')].find(one => one.innerText.includes('67.0% to 88.8%'))"
        assert browser.run(f"return {interval}.getBoundingClientRect().right <= innerWidth"), "the interval is not cut"
        badges = "[...document.querySelectorAll('.pill, .tag')]"
        assert browser.run(f"return {badges}.every(one => one.offsetHeight < 34)"), "badges do not break"
    seen = set()
    for scheme in ("light", "dark"):
        browser.colors(scheme)  # type: ignore[arg-type]
        seen.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    assert browser.run("return document.title").endswith("Etude report"), "no text of the run became a script"
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.complaints() == []


def test_labels_of_axes_can_be_read_at_every_width(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_run_report(make_run(tmp_path / "run").dir).as_uri())
    for width in (1280, 768, 390, 320):
        browser.resize(width, 900)
        sizes = browser.run("""return [...document.querySelectorAll(".chart.wide g.linear .grid text")].map(one =>
            parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getBoundingClientRect().width / 560)""")
        assert len(sizes) > 10 and min(sizes) > 8.5, (width, min(sizes))
        beyond = """return [...document.querySelectorAll(".chart.wide g.linear .grid text")].filter(one => {
            const text = one.getBoundingClientRect(), card = one.closest("figure").getBoundingClientRect();
            return text.left < card.left - 1 || text.right > card.right + 1 }).length"""
        assert browser.run(beyond) == 0, "labels stay in their card"


def test_why_episodes_failed_is_whole_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    result = made_up_result(env=EVIL)
    film = tmp_path / "evaluation/videos" / film_name(result.rows[1])
    film.parent.mkdir(parents=True)
    film.write_bytes(b"no film at all")
    replace(result, videos=(film,)).keep(tmp_path / "evaluation/a-test")
    browser.open(write_run_report(tmp_path).as_uri())
    for width, height in ((1280, 900), (390, 844)):
        browser.resize(width, height)
        assert browser.run(CUT) == []
        cases = "[...document.querySelectorAll('.case')]"
        assert browser.run(f"return {cases}.every(one => one.scrollWidth <= one.clientWidth + 1)")
        assert browser.run("return [...document.querySelectorAll('.maps .mark')].every(one => one.getBBox().width > 5)")
    assert "left the demonstrations early" in browser.text("dl.kinds")
    browser.run("document.querySelector('.maps a').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert browser.run("return document.querySelector('.case:target h3').innerText").startswith("Episode ")
    assert browser.run("return document.title").endswith("Etude report") and browser.complaints() == []


def test_groups_of_a_comparison_can_be_hidden(browser: Browser, tmp_path: Path) -> None:
    paths = [make_run(tmp_path / f"lr{lr}-{seed}", lr, seed).dir for lr in (1e-3, 2e-3) for seed in range(3)]
    browser.resize(390, 844)
    browser.open(write_comparison(compare_runs(paths), tmp_path / "compare.html").as_uri())
    assert browser.run(CUT) == []
    shown = (
        "return [...document.querySelectorAll('svg g.linear > .g1')].filter(one => one.getClientRects().length).length"
    )
    before = browser.run(shown)
    assert before > 0
    browser.run("document.getElementById('show-1').click()")
    assert browser.run(shown) == 0
    browser.run("document.getElementById('log').click()")
    assert browser.run("return getComputedStyle(document.querySelector('svg g.linear')).display") == "none"
    assert browser.complaints() == []


def test_a_sweep_is_whole_on_a_phone_and_deaf_to_its_texts(browser: Browser, tmp_path: Path) -> None:
    space = parse_space(["training.lr=log(1e-4,1e-1)", f"policy.params.{EVIL.replace('=', '')}={EVIL},[4;4]"])
    study = TrialStudy(tmp_path, space, Objective("eval/loss", is_large=False))
    for number in range(6):
        trial = study.ask()
        assert trial is not None
        run = make_run(tmp_path / f"trial-{number:04d}", trial.params["training.lr"], number)
        if number == 3:
            study.fail(trial, EVIL)
        elif number == 4:
            study.report(trial, 100, 1e6)
            study.prune(trial, 100)
        else:
            study.finish(trial, study.objective.score(run.metrics_path) or 0.0)
    shares = {parameter.key: 0.5 for parameter in space.parameters}
    page = write_page(
        tmp_path, study, name=EVIL, trials=6, command_again=lambda values: f"etude train {EVIL}", importances=shares
    )
    browser.open(page.as_uri())
    for width in (1280, 390):
        browser.resize(width, 900)
        assert browser.run(CUT) == []
    assert "4 finished, 1 pruned" in browser.text("header") and "1 point beyond the scale" in browser.text("main")
    assert browser.run("return document.querySelectorAll('section svg circle').length") > 15
    assert browser.run("return document.title").endswith("Etude sweep"), "no text of the sweep became a script"
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.complaints() == []


def test_a_watched_page_takes_what_is_new_and_keeps_what_was_chosen(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "live")
    with ServedPages(make_server(RunWatch(lambda: [run.dir], evaluation_sections), 0)) as served:
        browser.resize(1280, 900)
        browser.open(served.url)
        browser.run("document.getElementById('log').click(); window.kept = true")
        with run.metrics() as metrics:
            metrics.write(500, {"train/loss": 0.0078125})
        browser.wait("return document.querySelector('dl.tiles').innerText.includes('0.007812')")
        assert browser.run("return window.kept && document.getElementById('log').checked"), "it was not loaded anew"
        assert browser.run("return document.querySelectorAll('svg .cursor circle').length") > 0, "curves can be read"
        assert browser.complaints() == []


UNTOUCHED = """return document.title !== "666" && [...document.querySelectorAll("*")].every(one =>
  ![...one.attributes].some(given => given.name.startsWith("on"))) && !document.querySelector("img, main script")"""


def make_hostile_run(directory: Path, lr: float = 1e-3) -> Path:
    """Make a run whose every text is markup: its name, settings, metrics, prompts, completions, and why it failed."""
    run = make_run(directory / f"run {EVIL.replace('/', '_')}", lr)
    row = {"step": 1, "chosen": ["best", "followed"], "prompt": EVIL, "text": EVIL, "reward": 1.0}
    (run.dir / "transcripts.jsonl").write_text(json.dumps({**row, "turns": [["model", EVIL], ["other", EVIL]]}) + "\n")
    run.set_status("failed", error=EVIL)
    return run.dir


def assert_deaf(browser: Browser, address: str, *, shows: str = "main") -> None:
    browser.open(address)
    browser.wait("return document.readyState === 'complete'")
    assert browser.run(UNTOUCHED), address
    assert EVIL in browser.text(shows) and browser.complaints() == []


def test_pages_of_runs_are_deaf_to_every_text_in_them(browser: Browser, tmp_path: Path) -> None:
    runs = [make_hostile_run(tmp_path / part, lr) for part, lr in (("a", 1e-3), ("b", 2e-3))]
    assert_deaf(browser, write_run_report(runs[0]).as_uri())
    assert_deaf(browser, write_comparison(compare_runs(runs), tmp_path / f"{EVIL.replace('/', '_')}.html").as_uri())
    with ServedPages(make_server(RunWatch(lambda: runs, evaluation_sections), 0)) as served:
        assert_deaf(browser, served.url)
        reports = browser.run("return [...document.querySelectorAll('a[href^=\"/run/\"]')].map(one => one.href)")
        assert len(set(reports)) == 2
        for address in (*reports, f"{served.url}compare"):
            assert_deaf(browser, address)


def test_the_page_of_a_red_team_evaluation_is_deaf_and_whole_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    turn = {"turn": 1, "context": EVIL, "probe": EVIL, "response": EVIL, "reward": 0.5, "response_score": 0.75}
    talks = [{"prompt": EVIL, "turns": [turn, {**turn, "turn": 2, "response_score": score}]} for score in (0.25, 1.0)]
    evaluator = ASTEvaluator(SimpleNamespace(eval_rollout=print, system=None), embedder=None)
    result = evaluator.aggregate_metrics(talks)
    page = ASTEvaluator.write_html(result, tmp_path / "redteam.html", baseline=result, title=f"Red-team report: {EVIL}")
    assert_deaf(browser, page.as_uri())
    for width, height in ((1280, 900), (390, 844)):
        browser.resize(width, height)
        assert browser.run(CUT) == []


@pytest.mark.nightly
def test_pages_of_a_hundred_runs_are_laid_out_in_three_seconds(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{number}", 1e-3 * (number + 1)).dir for number in range(100)]
    browser.resize(1280, 900)
    page = write_comparison(compare_runs(runs), tmp_path / "compare.html")
    with ServedPages(make_server(RunWatch(lambda: runs, evaluation_sections), 0)) as served:
        served.get("/"), served.get("/compare")  # made before, so that the browser's work is what is measured
        for address in (page.as_uri(), served.url, f"{served.url}compare"):
            browser.open(address)
            browser.wait("return document.readyState === 'complete'")
            assert browser.cpu_s() < 3.0, address
