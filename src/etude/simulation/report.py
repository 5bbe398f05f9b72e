"""What evaluations in simulation add to the report of a run: a table of success, and films. Imports no torch."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.runs.evaluations import FOLDER
from etude.runs.page import render, spread
from etude.runs.report import write_report
from etude.simulation.results import DIAGNOSIS, EvaluationResult, film_name

if TYPE_CHECKING:
    from etude.simulation.diagnosis import Diagnosis

MOST_FILMS = 8
LARGEST_FILM_BYTES = 2_000_000
MOST_STEPS, FILMS_OF_A_STEP = 8, 2
"""Steps of the film strip, and films of each."""
_FILM_NAME = re.compile(r"(.*)-(success|failure|episode)")


def write_run_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the whole report of a run: with what was found in simulation, where that was looked for."""
    return write_report(run_dir, output, extra_sections=evaluation_sections(run_dir))


def evaluation_sections(run_dir: Path) -> list[tuple[str, str]]:
    """Return title and HTML of each section that the evaluations of a run are worth; none if there were none."""
    results = list(_read_results(run_dir / FOLDER))
    films = [path.name for result in results for path in result.videos]
    by_name = {name: film for name in films[:MOST_FILMS] if (film := embed_film(run_dir / FOLDER / "videos" / name))}
    why = "".join(_explain(result, by_name) for result in results)
    shown = list(by_name.values())
    sections = []
    if results:
        known = any(result.total.knows_success for result in results)
        title = "Success in simulation" if known else "Reward in simulation"
        sections.append((title, render("simulation/rates.html", results=results)))
    if shown:
        columns = len(shown) if len(shown) <= 4 else 3 if len(shown) <= 6 else 4
        sections.append(("The policy acting", render("simulation/films.html", films=shown, columns=columns)))
    if why:
        sections.append(("Why it failed", why))
    if strip := _film_strip(run_dir):
        sections.append(("Films by step", render("simulation/strip.html", steps=strip)))
    return sections


def _explain(result: EvaluationResult, films: dict[str, dict[str, str]]) -> str:
    """Return why episodes failed, where that was kept; the films that are shown there are taken out of the others."""
    if result.diagnosis is None:
        return ""
    from etude.simulation.failure_page import failure_section

    failures = [row for row in result.rows if row.success is False]
    shown = {(row.env, row.episode): film for row in failures if (film := films.get(film_name(row))) is not None}
    html = failure_section(result.diagnosis, shown)
    if html:
        for row in failures:
            films.pop(film_name(row), None)
    return html


def _read_results(folder: Path) -> Iterator[EvaluationResult]:
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("step-"):
            continue  # of a callback: their rates are curves already
        if (result := _read_result(path)) is not None:
            yield replace(result, diagnosis=_read_diagnosis(path, result))


def _read_diagnosis(path: Path, result: EvaluationResult) -> Diagnosis | None:
    """Return the diagnosis beside a result; None if there is none, or one of other episodes."""
    beside = path.with_name(path.stem + DIAGNOSIS)
    if not beside.is_file():
        return None
    from etude.simulation.diagnosis import read_diagnosis

    found = read_diagnosis(beside)
    rows = [] if found is None else [row for one in found.environments for row in one.rows]
    return found if {*rows} == {*result.rows} else None


def _read_result(path: Path) -> EvaluationResult | None:
    try:
        return EvaluationResult.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def embed_film(path: Path) -> dict[str, str] | None:
    """Return a film as a page shows it; None if it cannot be read or is too large for one."""
    try:
        if path.stat().st_size > LARGEST_FILM_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    parts = _FILM_NAME.fullmatch(path.stem)
    name, outcome = (parts[1], parts[2]) if parts else (path.stem, "episode")
    return {"name": name, "outcome": outcome, "data": base64.b64encode(content).decode()}


def _film_strip(run_dir: Path) -> list[dict[str, Any]]:
    """Return films of evaluations during training, by step: a few steps from the first to the last."""
    folders: dict[int, Path] = {}
    for pattern in ("*/step-*", "*/*/step-*"):
        for folder in run_dir.glob(pattern):
            number = folder.name.removeprefix("step-")
            is_ours = number.isdecimal() and "checkpoints" not in folder.relative_to(run_dir).parts
            if is_ours and any(folder.glob("*.mp4")):
                folders.setdefault(int(number), folder)
    strip = []
    for step, folder in spread(sorted(folders.items()), MOST_STEPS):
        made = [
            film for path in sorted(folder.glob("*.mp4"))[:FILMS_OF_A_STEP] if (film := embed_film(path)) is not None
        ]
        if made:
            result = _read_result(run_dir / FOLDER / f"step-{step:08d}.json")
            strip.append({"step": step, "films": made, "rate": None if result is None else result.total})
    return strip
