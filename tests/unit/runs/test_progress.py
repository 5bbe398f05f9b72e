"""Progress: live in a terminal, plain lines elsewhere, never in the way."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time

import pytest

from etude.runs.progress import (
    REFRESH_INTERVAL_S,
    ProgressDisplay,
    format_duration,
    format_figure,
    plain_line,
    shown_metrics,
)

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_log_event_outside_a_terminal_is_one_plain_line() -> None:
    stream = io.StringIO()
    with ProgressDisplay(stream=stream) as display:
        display.update(50, 1000, {"train/loss": 1.234, "lr/policy": 1e-3, "time/step_ms": 1.0}, rate=820.0, eta=12.0)
        display.update(51, 1000)  # a time-based refresh says nothing here
    assert stream.getvalue() == "step 50/1000  loss 1.234  820 steps/s  ETA 0:12\n"


def test_the_time_left_follows_from_the_rate() -> None:
    assert plain_line(100, 1000, {"loss": 1.0}, 10.0, None).endswith("10 steps/s  ETA 1:30")
    assert plain_line(100, None, {"loss": 1.0}, 10.0, None) == "step 100  loss 1  10 steps/s"
    assert plain_line(1000, 1000, {"loss": 1.0}, None, float("inf")) == "step 1000/1000  loss 1"


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream=stream, rank=1)
    display.update(1, 2, {"loss": 1.0})
    display.message("hello")
    display.close()
    assert stream.getvalue() == ""


def test_what_matters_comes_first_and_housekeeping_is_left_out() -> None:
    row = {"epoch": 1.0, "eval/accuracy": 0.5, "train/accuracy": 0.4, "grad_norm/policy": 2.0, "train/loss": 0.1}
    assert list(shown_metrics(row)) == ["eval/accuracy", "train/loss", "train/accuracy"]
    assert next(iter(shown_metrics(row, {"best_metric": "train/accuracy"}))) == "train/accuracy"


def test_training_from_rewards_shows_the_reward_and_its_best(terminal: Terminal) -> None:
    clock = Clock()
    with ProgressDisplay(stream=terminal, clock=clock) as display:
        for step, reward in ((10, 0.25), (20, 0.75), (30, 0.5)):
            clock.now = step
            row = {"train/loss": 0.0, "train/reward": reward, "train/kl": 0.01, "train/clip_fraction": 0.125}
            display.update(step, 60, row, rate=4.0)
    shown = ESCAPES.sub("", terminal.getvalue()).splitlines()
    assert "reward 0.5 (best 0.75 at 20)  kl 0.01  clip_fraction 0.125  loss 0" in shown
    plain = plain_line(30, 60, {"train/loss": 0.0, "train/reward": 0.5}, 4.0, None)
    assert plain == "step 30/60  reward 0.5  loss 0  4 steps/s  ETA 0:08"


@pytest.mark.parametrize("columns", [80, 50])
def test_both_lines_fit_the_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    metrics = {f"train/a_rather_long_name_{index}": index / 7 for index in range(4)} | {"eval/success": 0.123456}
    with ProgressDisplay(stream=terminal) as display:
        display.update_part(123456, 1_000_000, "turns 12/28")
        display.update(123456, 1_000_000, metrics, rate=1234.5, eta=123456.0)
    lines = ESCAPES.sub("", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("eval/success 0.1235 (best 0.1235 at 123456)") for line in lines)
    if columns == 80:
        assert any("123456/1000000" in line and "ETA" in line for line in lines)


def test_a_terminal_shows_a_live_bar_and_ends_clean(terminal: Terminal) -> None:
    display = ProgressDisplay(stream=terminal)
    display.update(500, 1000, {"train/loss": 0.25}, rate=100.0)
    display.message("checkpoint saved [step 500]")
    display.close()
    display.close()
    raw = terminal.getvalue()
    text = ESCAPES.sub("", raw)
    assert "500/1000" in text
    assert "100 steps/s  ETA 0:05" in text
    assert "loss 0.25" in text
    assert "checkpoint saved [step 500]" in text
    assert raw.endswith("\n")
    assert "\x1b[?25l" not in raw, "the cursor was hidden: a killed run would leave the terminal without one"


def test_the_last_state_is_shown_even_if_it_came_between_refreshes(terminal: Terminal) -> None:
    clock = Clock()
    display = ProgressDisplay(stream=terminal, clock=clock)
    display.update(1, 1000, {"loss": 3.0})
    display.update(1000, 1000, {"loss": 0.125})
    display.close()
    lines = [line.rstrip() for line in ESCAPES.sub("", terminal.getvalue()).splitlines()]
    assert lines[-1] == "loss 0.125 (best 0.125 at 1000)"
    assert lines[-2].endswith("1000/1000")


def test_a_terminal_is_repainted_at_most_ten_times_a_second(terminal: Terminal) -> None:
    clock = Clock()
    display = ProgressDisplay(stream=terminal, clock=clock)
    paints = 0
    size = 0
    for step in range(1000):
        clock.now = step / 1000
        display.update(step, 1000, {"loss": 1.0})
        paints += terminal.tell() > size
        size = terminal.tell()
    display.close()
    assert 2 <= paints <= 10
    assert REFRESH_INTERVAL_S >= 0.1


def test_an_update_between_refreshes_costs_microseconds(terminal: Terminal) -> None:
    display = ProgressDisplay(stream=terminal, clock=Clock())
    display.update(0, 100)
    start = time.process_time()
    for step in range(10_000):
        display.update(step, 10_000, None, 100.0)
    assert time.process_time() - start < 0.2  # 20 us each, with a wide margin; about 1 us is usual
    display.close()


def test_no_color_is_respected(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display = ProgressDisplay(stream=terminal)
    display.update(5, 10, {"loss": 1.0})
    display.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())


def test_a_closed_stream_does_not_stop_training(terminal: Terminal) -> None:
    plain = io.StringIO()
    plain.close()
    for stream in (plain, terminal):
        display = ProgressDisplay(stream=stream)
        stream.close()
        display.update(1, 2, {"loss": 1.0})
        display.message("still here")
        display.close()


def test_a_reader_that_went_away_does_not_stop_training() -> None:
    code = (
        "import sys; from etude.runs.progress import ProgressDisplay\n"
        "display = ProgressDisplay(stream=sys.stdout)\n"
        "for step in range(20000): display.update(step, None, {'loss': 1.0})\n"
        "display.close(); sys.stderr.write('done'); sys.stderr.flush(); import os; os._exit(0)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == "done"
    child.stderr.close()
    assert child.wait(timeout=60) == 0


@pytest.mark.parametrize(
    "seconds,text",
    [
        (0, "0:00"),
        (12.4, "0:12"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7809, "2:10:09"),
        (273600, "3 d 04:00"),
        (-5, "0:00"),
    ],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    "value,text",
    [(1.23456, "1.235"), (0.00012345, "0.000123"), (12345.6, "12346"), (0.0, "0"), (3.0, "3"), (float("nan"), "nan")],
)
def test_figures_are_short(value: float, text: str) -> None:
    assert format_figure(value) == text


def test_a_long_step_shows_its_parts_after_a_silence() -> None:
    stream, now = io.StringIO(), [0.0]
    display = ProgressDisplay(stream=stream, clock=lambda: now[0])
    for at_s, part in [(1.0, "turns 1/8"), (6.0, "turns 2/8"), (7.0, "turns 3/8"), (11.0, "turns 4/8")]:
        now[0] = at_s
        display.update_part(0, 10, part)
    display.update(1, 10, {"loss": 0.5})
    now[0] = 12.0
    display.update_part(1, None, "turns 1/8")
    assert stream.getvalue().splitlines() == ["step 1/10: turns 2/8", "step 1/10: turns 4/8", "step 1/10  loss 0.5"]


def test_a_run_that_acts_while_it_learns_shows_how_acting_goes() -> None:
    names = ["buffer_episodes", "buffer_frames", "env_steps", "success", "updates_per_env_step", "weights_age"]
    shown = shown_metrics({"train/loss": 1.0, **{f"train/online/{name}": 2.0 for name in names}})
    assert next(iter(shown)) == "train/online/success"
    wanted = {"success", "buffer_frames", "weights_age", "updates_per_env_step"}
    assert shown.keys() == {"train/loss", *(f"train/online/{name}" for name in wanted)}
