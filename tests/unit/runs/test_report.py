"""The report: one file, complete, harmless, and readable whatever the run left behind."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etude.errors import EtudeError
from etude.runs import charts
from etude.runs.charts import Series, downsample, format_step, linear_ticks, log_ticks, plan_chart, smooth
from etude.runs.manifest import Manifest
from etude.runs.page import render
from etude.runs.report import plan_tiles, read_facts, write_report
from tests.unit.runs.strict_page import Page


def make_run(
    directory: Path, rows: list[dict[str, Any]] | None = None, config: str = "", status: dict[str, Any] | None = None
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if rows is not None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config:
        (directory / "config.yaml").write_text(config)
    (directory / "status.json").write_text(json.dumps(status or {"state": "finished", "step": 100}))
    return directory


def add_checkpoint(run: Path, step: int, metric: float | None, *links: str) -> None:
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(Manifest(step, metric, {}, {}).dump())
    for link in links:
        (run / "checkpoints" / link).symlink_to(path.name)


def read_text(run: Path) -> str:
    return " ".join(read_page(run)[1].text)


def read_page(run: Path, **options: Any) -> tuple[str, Page]:
    html = write_report(run, **options).read_text(encoding="utf-8")
    return html, Page(html)


ROWS = [
    {
        "step": step,
        "epoch": step / 10,
        "train/loss": 2 / step,
        "lr/actor": 1e-3,
        "lr/critic": 1e-4,
        "grad_norm/actor": 1.0,
        "time/step_ms": 1.5,
        "success": 1.0,
    }
    for step in range(10, 101, 10)
] + [{"step": step, "eval/loss": abs(step - 60) + 1.0} for step in range(20, 101, 20)]
CONFIG = "training:\n  training_steps: 100\n  best_metric: eval/loss\n"


def test_a_full_run_shows_figures_curves_checkpoints_config_and_environment(tmp_path: Path) -> None:
    status = {
        "state": "finished",
        "step": 100,
        "started": "2026-01-02T03:04:05+00:00",
        "duration_s": 65,
        "parameters": 1234,
    }
    run = make_run(tmp_path / "my-run", ROWS, CONFIG, status)
    (run / "environment.json").write_text(json.dumps({"python": "3.11.7", "packages": {"torch": "2.13.0"}}))
    add_checkpoint(run, 60, 1.0, "best")
    add_checkpoint(run, 100, math.nan, "last")
    _, page = read_page(run)
    text = " ".join(page.text)
    for expected in (
        "my-run",
        "finished",
        "1:05",
        "of 100",
        "1,234",
        "2026-01-02 03:04",
        "3.11.7",
        "2.13.0",
        "training_steps",
    ):
        assert expected in text
    assert "best 1 at step 60" in text
    assert "min 0.02, max 0.2" not in text, "training and evaluation are in one chart"
    titles = re.findall(r"Curve of ([^:]+):", " ".join(page.attributes("aria-label")))
    assert titles == ["loss", "learning rate", "gradient norm", "time/step_ms", "success"]
    assert [name for name in page.attributes("class") if name.startswith("tag")] == ["tag last", "tag best"]


def test_the_page_needs_no_network_and_runs_only_its_own_script(tmp_path: Path) -> None:
    html, page = read_page(make_run(tmp_path / "run", ROWS, CONFIG))
    assert all(link.startswith("#") for link in page.attributes("href") + page.attributes("src"))
    assert not re.search(r"https?:|url\(|@import", html)
    (policy,) = [content for content in page.attributes("content") if "default-src" in content]
    script = html[html.index("<script>") + 8 : html.index("</script>")]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy
    assert html.count("<script") == 1


def test_everything_from_the_run_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>\'"&'
    rows = [{"step": step, f"train/{evil}": 1.0, f"lr/{evil}": 1.0} for step in (1, 2)]
    status = {"state": "failed", "step": 2, "error": evil, "warnings": [evil], "started": evil}
    run = make_run(tmp_path / "a&b <i>", rows, f"note: {json.dumps(evil)}\n", status)
    (run / "environment.json").write_text(json.dumps({evil: evil, "nested": {evil: [evil]}}))
    html, page = read_page(run)
    assert html.count("<script") == 1
    assert "<img" not in html
    assert not any(tag in ("i", "img") for tag, _ in page.tags)
    assert "a&b <i>" in "".join(page.text)


def test_a_run_without_anything_still_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "empty"
    run.mkdir()
    text = read_text(run)
    assert "No metrics were logged yet." in text
    assert "No checkpoint was saved." in text
    assert "unknown" in text


def test_damaged_files_become_warnings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS, "training: [unclosed\n")
    (run / "environment.json").write_text("{")
    add_checkpoint(run, 10, 0.5, "last")
    (run / "checkpoints" / "step-00000010" / "manifest.json").write_text("junk")
    text = read_text(run)
    assert "config.yaml cannot be read" in text
    assert "environment.json cannot be read" in text
    assert "manifest.json is damaged" in text


def test_values_that_are_not_finite_leave_a_mark_and_a_warning(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "train/loss": 1.0 / step, "train/bad": math.nan} for step in (1, 2, 3)]
    rows[1]["train/loss"] = math.inf
    html, page = read_page(make_run(tmp_path / "run", rows))
    text = " ".join(page.text)
    assert "train/loss has a value that is not finite, first at step 2" in text
    assert "train/bad has 3 values that are not finite, first at step 1" in text
    assert "every value is NaN or infinite" in text
    assert 'class="broken"' in html
    assert not any("nan" in path.lower() or "inf" in path.lower() for path in page.attributes("d"))


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_the_reason_of_an_early_end_is_shown(tmp_path: Path, state: str) -> None:
    status = {"state": state, "step": 3, "error": "non-finite loss at step 3 on rank 0"}
    assert "non-finite loss at step 3 on rank 0" in read_text(make_run(tmp_path / "run", ROWS, "", status))


def test_secrets_of_the_environment_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-5f2a<&9c"
    monkeypatch.setenv("REPORT_TEST_TOKEN", canary)
    status = {"state": "failed", "step": 1, "error": f"401 for {canary}"}
    run = make_run(tmp_path / "run", [{"step": 1, f"train/{canary}": 1.0}], "key: ${env:REPORT_TEST_TOKEN}\n", status)
    (run / "environment.json").write_text(json.dumps({"argv": ["train", f"key={canary}"]}))
    html, page = read_page(run)
    assert "canary-5f2a" not in html
    assert "${env:REPORT_TEST_TOKEN}" in "".join(page.text)


def test_a_run_whose_process_is_gone_is_shown_as_killed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=60)
    status = {"state": "running", "step": 0, "pid": gone.pid, "host": socket.gethostname(), "duration_s": 0.0}
    _, page = read_page(make_run(tmp_path / "run", ROWS, CONFIG, status))
    text = " ".join(page.text)
    assert "killed" in text
    assert "pill killed" in page.attributes("class")
    assert "100" in text


def test_extra_sections_are_placed_and_linked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    html, page = read_page(run, extra_sections=[("Videos & more", "<p>rollout</p>")])
    assert "<p>rollout</p>" in html
    assert "#videos-more" in page.attributes("href")


def test_a_long_run_gives_a_small_page_quickly(tmp_path: Path) -> None:
    rows = [
        {"step": step, **{f"train/m{index}": math.sin(step * (index + 1)) for index in range(5)}}
        for step in range(20_000)
    ]
    run = make_run(tmp_path / "run", rows)
    start = time.process_time()
    path = write_report(run)
    assert time.process_time() - start < 5
    assert path.stat().st_size < 400_000


def test_the_output_path_is_chosen_and_replaced_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    target = tmp_path / "deep" / "page.html"
    assert write_report(run, target) == target
    assert write_report(run, target) == target
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert write_report(run) == run / "report.html"


def test_a_missing_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="no such run directory"):
        write_report(tmp_path / "absent")


def test_reporting_imports_no_torch() -> None:
    code = "import sys, etude.runs.report; sys.exit(bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


def test_downsampling_keeps_ends_and_extremes() -> None:
    values = [math.sin(index / 50) for index in range(10_000)]
    values[3333], values[7777] = 99.0, -99.0
    chosen = downsample(values, buckets=100)
    assert {0, 3333, 7777, 9999} <= set(chosen)
    assert len(chosen) <= 202
    assert chosen == sorted(chosen)
    assert downsample(values[:5], buckets=100) == [0, 1, 2, 3, 4]


def test_smoothing_does_not_lag_and_keeps_a_line_straight() -> None:
    line = [3.0 - 0.01 * index for index in range(200)]
    assert smooth(line) == pytest.approx(line)


def test_there_is_no_half_of_a_step_on_an_axis() -> None:
    for last, steps in ((15, ["5", "10", "15"]), (3, ["1", "2", "3"]), (1.4, ["0.25", "0.5", "0.75", "1", "1.25"])):
        chart = plan_chart("a", [Series("a", [0.1, last], [1.0, 2.0])])
        assert [text for _, text in chart["scales"]["linear"]["columns"]] == steps


def test_labels_of_small_values_are_short() -> None:
    chart = plan_chart("a", [Series("a", [1, 2], [1.2e-5, 1.29e-5])])
    labels = [text for _, text in chart["scales"]["linear"]["rows"]]
    assert "1.25e-5" in labels and max(map(len, labels)) <= 7


@pytest.mark.parametrize("low,high", [(0, 1), (-3, 7), (0.00012, 0.00013), (1e6, 5e6), (1e-300, 2e-300)])
def test_linear_ticks_are_few_inside_and_even(low: float, high: float) -> None:
    ticks = linear_ticks(low, high)
    slack = (high - low) * 1e-6
    assert 2 <= len(ticks) <= 7
    assert all(low - slack <= tick <= high + slack for tick in ticks)


def test_logarithmic_ticks_are_round() -> None:
    assert log_ticks(0.09, 20) == pytest.approx([0.1, 1, 10])
    assert log_ticks(0.9, 11) == pytest.approx([1, 2, 5, 10])
    assert 3 <= len(log_ticks(1e-30, 1e30)) <= 8
    assert len(log_ticks(2.1, 2.9)) >= 3


def test_steps_on_one_axis_share_a_unit() -> None:
    assert [format_step(step, 40_000) for step in (0, 5_000, 20_000)] == ["0", "5k", "20k"]
    assert format_step(1_500_000, 2e6) == "1.5M"
    assert format_step(500, 1000) == "500"


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0],
        [-1.0, 1.0],
        [1e299, -1e299],
        [1e-320, 1.0],
        [5e-324],
        [1e300, 1.7e308],
        [0.1] * 3,
        [1e16, 1e16 + 2],
    ],
)
def test_any_values_can_be_drawn(values: list[float]) -> None:
    drawn = render("runs/chart.html", chart=plan_chart("x", [Series("x", range(len(values)), values)]))
    numbers = [float(found) for d in re.findall(r' d="M([^"]+)"', drawn) for found in re.findall(r"-?\d+\.\d", d)]
    assert "nan" not in drawn
    assert all(-1 <= number <= charts.WIDTH + 1 for number in numbers)


def test_first_points_that_dwarf_a_curve_do_not_set_its_scale() -> None:
    values = [1e6, 5e4, *(2.0 - index / 100 for index in range(98))]
    chart = plan_chart("loss", [Series("loss", range(100), values)])
    assert chart["beyond"] == "2 points beyond the scale, the furthest 1,000,000; the logarithmic scale shows all"
    labels = [float(text.replace(",", "")) for _, text in chart["scales"]["linear"]["rows"]]
    assert max(labels) < 3
    curve = chart["scales"]["linear"]["curves"][0]["path"]
    assert all(charts.TOP <= float(y) <= charts.HEIGHT - charts.BOTTOM for y in re.findall(r" (-?[\d.]+)", curve))
    assert "beyond the scale" in render("runs/chart.html", chart=chart)


@pytest.mark.parametrize(
    "values", [[2.0, *([1.0, 1.1] * 20)], [*([1.0, 1.1] * 20), 90.0], [9.0, 1.0, 1.0], [5.0, *([1.0] * 50)]]
)
def test_a_scale_holds_everything_else(values: list[float]) -> None:
    """A fall of a few times, a leap at the end, a few points, a curve that is flat after its first point."""
    chart = plan_chart("loss", [Series("loss", range(len(values)), values)])
    expected = "1 point beyond" if len(values) == 41 and values[0] == 2.0 else ""
    assert chart["beyond"].startswith(expected) and bool(chart["beyond"]) == bool(expected)


def test_the_tiles_lead_with_what_matters(tmp_path: Path) -> None:
    rows = [
        {"step": step, "train/loss": 0.0, "train/reward": reward, "train/kl": 0.1, "lr/policy": 1e-3}
        for step, reward in ((5, 0.25), (10, 0.75), (15, 0.5))
    ]
    facts = read_facts(make_run(tmp_path / "run", rows))
    tiles = plan_tiles(facts)
    assert tiles[0] == ("train/reward", "0.5", "best 0.75 at 10")
    assert [title for title, *_ in tiles[1:]] == ["train/kl", "train/loss", "Steps"]


def test_a_band_is_drawn_about_its_curve() -> None:
    line = Series("a", [0, 1, 2], [1.0, 2.0, 3.0], [0.5, 1.0, 2.0], [2.0, 3.0, 4.0])
    drawn = render("runs/chart.html", chart=plan_chart("reward", [line]))
    (band,) = set(re.findall(r'class="band" d="([^"]+)"', drawn[: drawn.index('class="log"')]))
    assert band.count("L") == 5 and band.endswith("Z")
