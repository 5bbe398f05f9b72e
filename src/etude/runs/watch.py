"""`etude watch`: reports over HTTP on this machine while training runs; the pages refresh themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote

from etude.runs.compare import compare_runs, render_comparison
from etude.runs.local_server import Resource, make_local_server
from etude.runs.page import render, scripts
from etude.runs.report import LEARNING, Facts, Section, plan_charts, plan_tiles, read_facts, render_page
from etude.runs.transcripts import transcript_sections
from etude.secrets import redact

KEPT_S = 10.0
"""How long a page is kept while no file of its runs changes: durations of running ones grow."""
TILES, CHARTS = 4, 3
"""What is shown of each run where there are several."""
PROGRESS = ("Steps", "Duration")
"""Tiles that say how far a run has come."""
_FILES = ("status.json", "metrics.jsonl", "transcripts.jsonl", "config.yaml", "checkpoints", "evaluation")


class RunWatch:
    """Makes the pages of runs, and again when their files have changed.

    Args:
        find: Returns the run directories to show; called for each request, so that new runs appear.
        sections: Returns what else a report shows of a run, as titles and HTML.
    """

    def __init__(self, find: Callable[[], Sequence[Path]], sections: Callable[[Path], Sequence[Section]]) -> None:
        self._find, self._sections = find, sections
        self._lock = Lock()
        self._kept: dict[str, tuple[Any, float, str]] = {}

    def page(self, address: str) -> str | None:
        """Return the page at an address; None if there is none."""
        runs = list(self._find())
        names = _name(runs)
        if address == "/" and len(runs) == 1:
            return self._fresh(address, runs, lambda: self._report(runs[0], several=False))
        if address == "/":
            return self._fresh(address, runs, lambda: self._overview(runs))
        if address == "/compare" and len(runs) > 1:
            return self._fresh(address, runs, lambda: render_comparison(compare_runs(runs), **_live_page(back=True)))
        if address.startswith("/run/") and (run := names.get(unquote(address.removeprefix("/run/")))) is not None:
            return self._fresh(address, [run], lambda: self._report(run, several=True))
        return None

    def _fresh(self, address: str, runs: Sequence[Path], make: Callable[[], str]) -> str:
        mark = [(str(run), _stamp(run)) for run in runs]
        with self._lock:
            before, made_s, page = self._kept.get(address, (None, 0.0, ""))
            if before != mark or time.monotonic() - made_s > KEPT_S:
                page = make()
                self._kept[address] = (mark, time.monotonic(), page)
        return page

    def _report(self, run: Path, *, several: bool) -> str:
        sections = [*transcript_sections(run), *self._sections(run)]
        return render_page(read_facts(run), sections, **_live_page(back=several))

    def _overview(self, runs: Sequence[Path]) -> str:
        shown = [_glance(name, read_facts(run)) for name, run in _name(runs).items()]
        return render("runs/watch.html", runs=shown, facts=[_count(shown)], **_live_page())


def _name(runs: Sequence[Path]) -> dict[str, Path]:
    """Return runs by name; those that share one, in several folders, by as much of the path as differs."""
    found: dict[str, Path] = {}
    for run in runs:
        parts = run.resolve().parts
        others = [other.resolve().parts for other in runs if other.resolve() != run.resolve()]
        count = next((n for n in range(1, len(parts)) if all(one[-n:] != parts[-n:] for one in others)), len(parts))
        found["/".join(parts[-count:])] = run
    return found


def _glance(name: str, facts: Facts) -> dict[str, Any]:
    charts = [chart for title, members in plan_charts(facts).items() if title in LEARNING for chart in members]
    return {
        "name": redact(name), "state": facts.state, "tiles": _glance_tiles(facts), "charts": charts[:CHARTS],
        "address": f"/run/{quote(name, safe='')}", "error": facts.status.get("error", ""),
    }  # fmt: skip


def _glance_tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return a few tiles: what matters, and always how far the run has come."""
    tiles = plan_tiles(facts)
    progress = [tile for tile in tiles if tile[0] in PROGRESS]
    return [tile for tile in tiles if tile not in progress][: TILES - len(progress)] + progress


def _count(shown: Sequence[dict[str, Any]]) -> str:
    running = sum(one["state"] == "running" for one in shown)
    return f"{len(shown)} runs, {running} running" if shown else "No run yet; this page shows them as they begin."


def _stamp(run: Path) -> list[tuple[int, int]]:
    found = []
    for name in _FILES:
        try:
            status = (run / name).stat()
        except OSError:
            continue
        found.append((status.st_mtime_ns, status.st_size))
    return found


def _live_page(*, back: bool = False) -> dict[str, Any]:
    return {**scripts("runs/page.js", "runs/live.js"), "refreshed": True, "back": back}


def make_server(watch: RunWatch, port: int) -> ThreadingHTTPServer:
    """Return a server on this machine that has its port; `serve_forever` answers."""

    def find(address: str) -> Resource | None:
        page = watch.page(address)
        return None if page is None else Resource.text(page)

    return make_local_server(find, port, index="the runs")
