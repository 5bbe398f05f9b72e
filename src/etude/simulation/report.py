"""What evaluations in simulation add to the report of a run: a table of success, and films. Imports no torch."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

from etude.runs.page import render
from etude.simulation.results import EvaluationResult

FOLDER = "evaluation"
MOST_FILMS = 8
LARGEST_FILM_BYTES = 2_000_000


def evaluation_sections(run_dir: Path) -> list[tuple[str, str]]:
    """Return title and HTML of each section that the evaluations of a run are worth; none if there were none."""
    results = list(_read_results(run_dir / FOLDER))
    films = [path.name for result in results for path in result.videos]
    shown = [film for name in films[:MOST_FILMS] if (film := _film(run_dir / FOLDER / "videos" / name))]
    sections = []
    if results:
        sections.append(("Success in simulation", render("simulation/rates.html", results=results)))
    if shown:
        sections.append(("The policy acting", render("simulation/films.html", films=shown)))
    return sections


def _read_results(folder: Path) -> Iterator[EvaluationResult]:
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("step-"):
            continue  # of a callback: their rates are curves already
        try:
            yield EvaluationResult.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError):
            continue


def _film(path: Path) -> dict[str, str] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) > LARGEST_FILM_BYTES:
        return None
    name, _, outcome = path.stem.rpartition("-")
    return {"name": name, "outcome": outcome, "data": base64.b64encode(content).decode()}
