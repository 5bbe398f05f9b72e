"""`etude compare` and `etude watch`: several runs at a time, on one page or while they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.output import print_json, print_table, say
from etude.cli.runs import find_run
from etude.errors import EtudeError

if TYPE_CHECKING:
    from etude.runs.compare import RunComparison, Standing

ROOT = Path("runs")
MOST_NAMED = 4


def find_runs(wanted: Sequence[str], root: Path = ROOT) -> list[Path]:
    """Return the directories of runs given as names, paths or patterns such as 'digits-*', each once."""
    found: dict[Path, Path] = {}
    for text in wanted:
        for path in _matching(text, root) if _is_pattern(text, root) else [find_run(text, root)]:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _is_pattern(text: str, root: Path) -> bool:
    """Tell whether a text is a pattern; what a folder is called is its name, whatever is in it."""
    return any(sign in text for sign in "*?[") and not any(place.is_dir() for place in (root / text, Path(text)))


def _require_runs(paths: Sequence[Path]) -> None:
    from etude.runs.directory import Run

    strangers = [path for path in paths if not Run(path).exists()]
    if strangers:
        raise EtudeError(f"{strangers[0]} is not a run: it has no status, metrics or checkpoints; see: etude runs")


def _matching(pattern: str, root: Path) -> list[Path]:
    from glob import glob

    from etude.runs.directory import Run

    places = [pattern] if "/" in pattern else [str(root / pattern), pattern]
    for place in places:
        runs = [Path(name) for name in sorted(glob(place)) if Path(name).is_dir() and Run(name).exists()]
        if runs:
            return runs
    raise EtudeError(
        f"no run matches {pattern!r}, neither under {root}/ nor here; `etude runs` lists the runs there are"
    )


def compare(wanted: Sequence[str], *, metric: str | None, output: Path | None, open_page: bool, as_json: bool) -> None:
    """Compare runs, print the table, and write the page."""
    from etude.runs.compare import compare_runs, write_comparison

    runs = find_runs(wanted)
    _require_runs(runs)
    if len(runs) < 2:
        raise EtudeError("compare takes two runs or more, as names, paths or a pattern such as 'digits-*'")
    comparison = compare_runs(runs, metric)
    path = write_comparison(comparison, output or runs[0].parent / "compare.html")
    if as_json:
        print_json(_as_values(comparison))
    else:
        print_comparison(comparison)
        say(f"page: {path}")
    if open_page:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def print_comparison(comparison: RunComparison) -> None:
    """Print groups of runs as a table, what differs, and what the differences are worth."""
    from etude.runs.compare import describe_cost
    from etude.runs.page import format_interval

    stick = comparison.yardstick
    rows = []
    for standing in comparison.standings:
        cost = describe_cost(standing.group)
        rows.append((
            standing.group.name,
            str(standing.group.seeds),
            "-" if standing.score is None else stick.write(standing.score),
            "-" if standing.interval is None else format_interval(standing.interval, stick.write),
            cost["steps"],
            cost["duration"],
        ))  # fmt: skip
    print_table(("runs", "seeds", stick.title, "95 % interval", "steps", "duration"), rows, right=(1, 2, 4, 5))
    say(f"{stick.title}: {stick.how}")
    if stick.note:
        say(stick.note)
    for name in comparison.settings[:5]:
        values = dict.fromkeys(str(group.settings.get(name, "-")) for group in comparison.groups)
        say(f"differs: {name}: {', '.join(values)}")
    if len(comparison.settings) > 5:
        say(f"differs: {len(comparison.settings) - 5} more settings")
    first = comparison.standings[0].group.name
    for standing in comparison.standings[1:]:
        apart = comparison.difference_text(standing)
        say(f"{standing.group.name} against {first}: {f'{apart}, ' if apart else ''}{standing.verdict}")


def _as_values(comparison: RunComparison) -> dict[str, Any]:
    def describe(standing: Standing) -> dict[str, Any]:
        kept = ("score", "interval", "difference", "difference_interval", "verdict", "is_real", "chance", "scores")
        settings = {name: standing.group.settings.get(name) for name in comparison.settings}
        return {
            "name": standing.group.name, "runs": [str(member.path) for member in standing.group.members],
            **{name: getattr(standing, name) for name in kept}, "settings": settings,
        }  # fmt: skip

    return {"metric": asdict(comparison.yardstick), "groups": [describe(one) for one in comparison.standings]}


def watch(wanted: Sequence[str], *, port: int, open_page: bool) -> None:
    """Serve the reports of runs until interrupted; without names, of those that are running, or else of the newest."""
    from etude.runs.local_server import HOST
    from etude.runs.watch import RunWatch, make_server
    from etude.simulation.report import evaluation_sections

    runs = find_runs(wanted)
    _require_runs(runs)
    server = make_server(RunWatch((lambda: present_runs(wanted)) if wanted else _running, evaluation_sections), port)
    address = f"http://{HOST}:{server.server_address[1]}/"
    with server:
        say(f"watching {_name_some(runs) if runs else 'runs/'} at {address} (Ctrl-C ends it)")
        _flush()
        if open_page:
            import webbrowser

            webbrowser.open(address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped watching; training goes on")


def present_runs(wanted: Sequence[str]) -> list[Path]:
    """Return the runs that are meant now: more may match a pattern than at first, and some may have been deleted."""
    from etude.runs.directory import Run

    found: dict[Path, Path] = {}
    for text in wanted:
        try:
            paths = find_runs([text])
        except EtudeError:
            continue
        found |= {path.resolve(): path for path in paths if Run(path).exists() and path.resolve() not in found}
    return list(found.values())


def _name_some(runs: Sequence[Path]) -> str:
    more = f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    return f"{', '.join(map(str, runs[:MOST_NAMED]))}{more}"


def _running() -> list[Path]:
    from etude.runs.directory import Run

    runs = Run.list(ROOT)
    found = [run.path for run in runs if run.state == "running"] or [run.path for run in runs[:1]]
    return sorted(found)


def _flush() -> None:
    import sys

    sys.stdout.flush()
