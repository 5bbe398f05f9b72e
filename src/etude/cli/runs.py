"""`etude runs` and `etude report`: what earlier runs left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from etude.cli.output import in_terminal, print_json, print_table, say
from etude.errors import EtudeError

if TYPE_CHECKING:
    from etude.runs.directory import RunSummary

MOST_METRICS = 3
HEADS = ("run", "state", "step", "metrics", "started", "duration")
RIGHT = ("step", "duration")


def find_run(run: str, root: Path = Path("runs")) -> Path:
    """Return the directory of a run given as a name under `root` or as a path.

    A bare name is looked for under `root` first: a folder of that name beside it is `./NAME`.
    """
    places = (Path(run), root / run) if os.sep in run else (root / run, Path(run))
    for path in places:
        if path.is_dir():
            return path
    from difflib import get_close_matches

    names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    close = get_close_matches(run, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`etude runs` lists the runs there are"
    raise EtudeError(f"there is no run {run!r}, neither under {root}/ nor as a directory; {hint}")


def print_runs(root: Path, *, as_json: bool) -> None:
    """Print the runs under `root`, newest first."""
    from etude.runs.directory import Run
    from etude.runs.progress import format_duration

    if not root.is_dir():
        raise EtudeError(f"{root}: no such folder; give the folder that holds the runs")
    summaries = Run.list(root)
    if as_json:
        print_json([asdict(summary) for summary in summaries])
        return
    if not summaries:
        say(f"no runs under {root}")
        return
    figures = [_main_figures(summary) for summary in summaries]
    heads: tuple[str, ...] = HEADS
    rows: list[tuple[str, ...]] = [
        (
            summary.name,
            summary.state,
            "-" if summary.step is None else str(summary.step),
            "  ".join(found),
            _moment(summary.started),
            format_duration(summary.duration_s),
        )
        for summary, found in zip(summaries, figures, strict=True)
    ]
    if in_terminal():
        heads, rows = fit_table(rows, figures, get_terminal_size().columns)
    print_table(heads, rows, right=[place for place, head in enumerate(heads) if head in RIGHT])


def fit_table(
    rows: Sequence[tuple[str, ...]], figures: Sequence[Sequence[str]], width: int
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and rows for a terminal: a line for each run, what leads and as much else as fits.

    Args:
        rows: What is told of each run, by `HEADS`.
        figures: Its metrics, one by one.
        width: Columns of the terminal.
    """
    kept: tuple[str, ...] = HEADS
    room, least = 0, max(len(parts[0]) for parts in figures)
    for without in ((), ("started",), ("started", "duration")):
        kept = tuple(head for head in HEADS if head not in without)
        widths = [max(len(row[place]) for row in [HEADS, *rows]) for place, head in enumerate(HEADS) if head in kept]
        room = width - (sum(widths) - widths[HEADS.index("metrics")]) - 3 * len(kept) + 1
        if room >= least:
            break
    shown = []
    for row, parts in zip(rows, figures, strict=True):
        text = parts[0]
        for part in parts[1:]:
            if len(text) + 2 + len(part) > room:
                break
            text += f"  {part}"
        cells = dict(zip(HEADS, row, strict=True)) | {"metrics": text}
        shown.append(tuple(cells[head] for head in kept))
    return kept, shown


def make_report(run: str, output: Path | None, *, open_page: bool) -> None:
    """Write the report of a run, say where it is, and open it if asked."""
    from etude.runs.directory import Run

    directory = find_run(run)
    if not Run(directory).exists():
        raise EtudeError(f"{directory} is not a run: it has no status, metrics or checkpoints; see: etude runs")
    from etude.simulation.report import write_run_report

    path = write_run_report(directory, output)
    say(str(path))
    if open_page:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _main_figures(summary: RunSummary) -> list[str]:
    from etude.runs.progress import format_figure

    found = [
        f"{one.total.title} {one.total.value_text()}{f' ({ends})' if (ends := one.total.interval_text()) else ''}"
        for one in summary.evaluations[:1]
    ]
    found += [f"{name} {format_figure(summary.metrics[name])}" for name in summary.leading]
    return found[:MOST_METRICS] or ["-"]


def _moment(started: object) -> str:
    # A status file may have been written by another program, or by hand.
    return f"{datetime.fromtimestamp(started):%Y-%m-%d %H:%M}" if isinstance(started, int | float) else "-"
