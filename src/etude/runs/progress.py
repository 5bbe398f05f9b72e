"""Live progress: a bar and what matters in a terminal, one plain line per log event elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from etude.runs.leading import find_best, is_quiet, lead

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

# Five repaints a second look live and cost about 1 % of one core (2 ms each).
REFRESH_INTERVAL_S = 0.2
PART_INTERVAL_S = 5.0
"""Silence after which a plain line tells how far a long step has come."""
ONLINE_METRICS = ("online/success", "online/buffer_frames", "online/weights_age", "online/updates_per_env_step")
"""What is shown of a run that acts while it learns."""
MOST_METRICS = 4
NARROWEST, BAR_WIDTH = 40, 24


class ProgressDisplay:
    """Show how far a run has come, on rank 0 only: in a terminal a bar, and under it what matters and its best.

    Call `update` with metrics at every log event, and without metrics for a time-based refresh; both are cheap, and
    a terminal is repainted at most `1 / REFRESH_INTERVAL_S` times a second.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        rank: int = 0,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled and rank == 0
        self._live = self._enabled and is_terminal(self._stream)
        self._clock = clock
        self._painted_at = -math.inf
        self._spoke_at = clock()
        self._part = ""
        self._state: tuple[int, int | None, float | None, float | None] | None = None
        self._dirty = False
        self.training: Mapping[str, Any] = {}
        """The part of the configuration that says which metric ranks checkpoints, and how."""
        self._metrics: dict[str, float] = {}
        self._best: dict[str, tuple[float, float]] = {}
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(
        self,
        step: int,
        total_steps: int | None = None,
        metrics: Mapping[str, float] | None = None,
        rate: float | None = None,
        eta: float | None = None,
    ) -> None:
        """Show `step` of `total_steps`; `rate` in steps per second, `eta` in seconds (else derived from the rate)."""
        if not self._enabled:
            return
        self._part = ""
        if not self._live:
            if metrics:
                self._write(plain_line(step, total_steps, metrics, rate, eta, self.training))
            return
        if metrics:
            self._take(step, metrics)
        self._state = (step, total_steps, rate, eta)
        self._dirty = True
        if self._clock() - self._painted_at >= REFRESH_INTERVAL_S:
            self._paint()

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)
        for name, value in metrics.items():
            at, best = self._best.get(name, (step, value))
            found = find_best(name, [at, step], [best, value], self.training)
            if found is not None:
                self._best[name] = found

    def update_part(self, step: int, total_steps: int | None, part: str) -> None:
        """Show how far the step after `step` has come: beside the bar, or as a line after a silence."""
        if not self._enabled:
            return
        if not self._live:
            if self._clock() - self._spoke_at >= PART_INTERVAL_S:
                self._write(f"step {step + 1}/{total_steps}: {part}" if total_steps else f"step {step + 1}: {part}")
            return
        self._part, self._dirty = part, True
        self._state = self._state or (step, total_steps, None, None)
        if self._clock() - self._painted_at >= REFRESH_INTERVAL_S:
            self._paint()

    def message(self, text: str) -> None:
        """Print one line above the bar, or as a line of its own."""
        if not self._enabled:
            return
        if self._progress is not None:
            try:
                self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            except (OSError, ValueError):
                self._enabled = False
        else:
            self._write(text)

    def close(self) -> None:
        """Paint the last state and leave the terminal clean; safe to call twice."""
        if self._enabled and self._live and self._dirty:
            self._paint()
        progress, self._progress = self._progress, None
        if progress is not None:
            try:
                progress.stop()
            except (OSError, ValueError):
                self._enabled = False

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, text: str) -> None:
        self._spoke_at = self._clock()
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # A closed pipe or terminal must not stop training.
            self._enabled = False

    def _paint(self) -> None:
        assert self._state is not None
        step, total_steps, rate, eta = self._state
        try:
            if self._progress is None:
                self._progress = _make_bar(self._stream)
                self._task = self._progress.add_task("training", total=total_steps, pace="", matters="")
                self._progress.start()
            assert self._task is not None
            pace = _pace(rate, _remaining(step, total_steps, rate, eta))
            matters = fit_parts(self._matters(), max(NARROWEST, self._progress.console.width) - 1)
            self._progress.update(self._task, completed=step, total=total_steps, pace="  ".join(pace), matters=matters)
            self._progress.refresh()
        except (OSError, ValueError):
            self._enabled = False
        self._painted_at = self._clock()
        self._dirty = False

    def _matters(self) -> list[str]:
        """Return the parts of the second line: how far a long step is, the metric that leads with its best, others."""
        shown = shown_metrics(self._metrics, self.training)
        parts = [f"{short_name(name)} {format_figure(value)}" for name, value in shown.items()]
        if parts and (best := self._best.get(next(iter(shown)))) is not None:
            parts[0] += f" (best {format_figure(best[1])} at {best[0]:.0f})"
        return [self._part, *parts] if self._part else parts


def fit_parts(parts: Sequence[str], width: int) -> str:
    """Join as many parts as fit into a line, the first one cut if it alone is too long."""
    line = parts[0][:width] if parts else ""
    for part in parts[1:]:
        if len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def is_terminal(stream: TextIO) -> bool:
    """Tell whether `stream` is a terminal that can be repainted."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False


def plain_line(
    step: int,
    total_steps: int | None,
    metrics: Mapping[str, float],
    rate: float | None,
    eta: float | None,
    training: Mapping[str, Any] | None = None,
) -> str:
    """Write one log event as text: `step 50/1000  loss 1.234  820 steps/s  ETA 0:12`."""
    head = f"step {step}/{total_steps}" if total_steps else f"step {step}"
    shown = shown_metrics(metrics, training).items()
    figures = [f"{short_name(name)} {format_figure(value)}" for name, value in shown]
    return "  ".join([head, *figures, *_pace(rate, _remaining(step, total_steps, rate, eta))])


def shown_metrics(metrics: Mapping[str, float], training: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Pick the metrics worth a glance, what matters first, and how acting goes; rates and timings are left out."""
    names = [name for name in lead(metrics, (training or {}).get("best_metric")) if not is_quiet(name)]
    others = [name for name in names if not short_name(name).startswith("online/")][:MOST_METRICS]
    return {name: metrics[name] for name in names if name in others or short_name(name) in ONLINE_METRICS}


def short_name(name: str) -> str:
    """Return a metric's name for a line of progress: what is measured in training needs no word of it."""
    return name.removeprefix("train/")


def format_figure(value: float) -> str:
    """Write a number in at most seven characters or so: `1.234`, `0.00012`, `12345`, `nan`."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Write a length of time as `0:12`, `3:05`, `2:10:09` or `3 d 04:00`."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _pace(rate: float | None, eta_s: float | None) -> list[str]:
    parts = []
    if rate is not None and rate > 0:
        parts.append(f"{rate:.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
    if eta_s is not None:
        parts.append(f"ETA {format_duration(eta_s)}")
    return parts


def _remaining(step: int, total_steps: int | None, rate: float | None, eta: float | None) -> float | None:
    if total_steps is not None and step >= total_steps:
        return None
    if eta is not None:
        return eta if math.isfinite(eta) else None
    return (total_steps - step) / rate if total_steps and rate else None


def _make_bar(stream: TextIO) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

    class BarAndFigures(Progress):
        """A bar, and a line under it."""

        def get_renderables(self) -> Iterable[Any]:
            yield from super().get_renderables()
            for task in self.tasks:
                if task.fields["matters"]:
                    yield Text(task.fields["matters"], no_wrap=True, overflow="ellipsis")

    columns: list[Any] = [
        BarColumn(bar_width=BAR_WIDTH),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
    ]
    # No refresh thread: it would take the interpreter lock from the training loop ten times a second.
    return BarAndFigures(*columns, console=_console(stream), auto_refresh=False, expand=False)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    class OpenCursorConsole(Console):
        """A console that never hides the cursor, so that even SIGKILL leaves the terminal usable."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    return OpenCursorConsole(file=stream, highlight=False)
