from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.runs import metrics
from etude.runs.metrics import MetricsLog, last_metrics, read_metrics


def write_rows(path: Path, steps: range) -> None:
    with MetricsLog(path) as log:
        for step in steps:
            log.write(step, {"train/loss": 1 / step})


def test_rows_are_readable_as_soon_as_they_are_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.write(50, {"epoch": 0.5, "train/loss": 0.1 + 0.2})
    assert read_metrics(log.path) == [{"step": 50, "epoch": 0.5, "train/loss": 0.30000000000000004}]
    log.close()
    log.close()


@given(value=st.floats())
def test_every_float_comes_back_exactly_and_every_line_is_strict_json(
    tmp_path_factory: pytest.TempPathFactory, value: float
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"x": value})
    (row,) = read_metrics(path)
    assert repr(row["x"]) == repr(value)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_numbers_of_numpy_and_torch_are_accepted(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write(1, {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": 3, "d": True, "e": math.nan})
    (row,) = read_metrics(log.path)
    assert [row[name] for name in "abcd"] == [0.5, 0.25, 3, 1.0]
    assert math.isnan(row["e"])


def test_a_row_and_its_order_are_stable_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with MetricsLog(tmp_path / name) as log:
            log.write(1, {"z": 1.0, "a": 1e-9})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b'{"step": 1, "z": 1.0, "a": 1e-09}\n'


def test_resuming_drops_the_rows_after_the_checkpoint_and_leaves_the_rest_untouched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 6))
    expected = path.read_bytes()
    write_rows(path, range(6, 9))
    with MetricsLog(path) as log:
        log.write(9, {"x": 1.0})
        log.truncate_after(5)
        assert path.read_bytes() == expected
        log.write(6, {"train/loss": 7.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_of_one_step_stay_together(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        for step in (5, 5, 10):
            log.write(step, {"x": 1.0})
        log.truncate_after(5)
    assert [row["step"] for row in read_metrics(log.path)] == [5, 5]


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3, "x"', b'{"step": 3}', b"\x00" * 100_000])
def test_a_torn_last_line_is_cut_off_and_swallows_nothing(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 3))
    good = path.read_bytes()
    path.write_bytes(good + torn)
    assert [row["step"] for row in read_metrics(path)][:2] == [1, 2]
    with MetricsLog(path) as log:
        log.truncate_after(2)
        log.write(3, {"x": 1.0})
    assert path.read_bytes() == good + b'{"step": 3, "x": 1.0}\n'


def test_a_file_without_any_whole_line_starts_over(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b"x" * 200_000)
    write_rows(tmp_path / "m.jsonl", range(1, 2))
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "train/loss": 1.0}]


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'[1]\n{"x": 1}\n\xff\xfe\n{"step": 1, "x": 2}\n3\n')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "x": 2}]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "absent.jsonl") == []
    assert last_metrics(tmp_path / "absent.jsonl") == {}


def test_the_latest_value_of_every_metric_is_found_near_the_end(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        for step in range(1, 3001):
            log.write(step, {"train/loss": 1 / step})
            if step == 2990:
                log.write(step, {"eval/loss": 0.5})
    assert last_metrics(log.path) == {"step": 3000, "train/loss": 1 / 3000, "eval/loss": 0.5}


def test_while_the_disk_is_full_rows_wait_and_none_is_lost_or_torn(tmp_path: Path) -> None:
    warnings: list[str] = []
    log = MetricsLog(tmp_path / "m.jsonl", on_warning=warnings.append)
    log.write(1, {"x": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 5, hard))
    try:
        for step in (2, 3, 4):
            log.write(step, {"x": float(step)})
        assert [row["step"] for row in read_metrics(log.path)] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(5, {"x": 5.0})
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2, 3, 4, 5]
    assert len(warnings) == 1
    log.close()


def test_a_disk_that_stays_full_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.runs.metrics._MAX_BACKLOG_BYTES", 1000)
    warnings: list[str] = []
    log = MetricsLog(tmp_path / "m.jsonl", on_warning=warnings.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for step in range(200):
            log.write(step, {"x": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close()
    steps = [row["step"] for row in read_metrics(log.path)]
    assert steps == list(range(steps[0], 200))
    assert log.path.stat().st_size < 2000
    assert "dropped" in warnings[1]


def test_run_files_are_read_without_torch() -> None:
    code = "import sys, etude.runs.metrics, etude.runs.directory, etude.runs.loggers, etude.runs.environment\n"
    code += "raise SystemExit(any(name in sys.modules for name in ('torch', 'numpy', 'wandb', 'mlflow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(0, 12), st.integers(1, 50), st.booleans())
def test_lines_are_found_from_the_end_whatever_the_block(
    lengths: list[int], last: int, block_bytes: int, torn: bool
) -> None:
    lines = [bytes([97 + number % 26]) * length for number, length in enumerate(lengths)]
    content = b"".join(line + b"\n" for line in lines) + (b"x" * last if torn else b"")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        found = list(metrics._lines_from_the_end(file.fileno(), block_bytes))
    assert [line for _, line in found] == lines[::-1]
    assert all(content[: end - 1].endswith(line) and content[end - 1 : end] == b"\n" for end, line in found)


def test_cutting_back_reads_only_what_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d, "loss": 0.5}\n' % step for step in range(100_000)))
    parsed = []
    loads = json.loads
    monkeypatch.setattr(metrics.json, "loads", lambda line: parsed.append(line) or loads(line))
    with MetricsLog(path) as log:
        log.truncate_after(99_990)
        log.write(99_991, {"loss": 0.25})
    assert len(parsed) < 20
    rows = path.read_bytes().splitlines()
    assert len(rows) == 99_992
    assert rows[-2:] == [b'{"step": 99990, "loss": 0.5}', b'{"step": 99991, "loss": 0.25}']
