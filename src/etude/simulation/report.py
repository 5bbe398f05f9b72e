"""What evaluations in simulation add to the report of a run: a table of success, and films. Imports no torch."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from etude.simulation.results import EvaluationResult, Rate

FOLDER = "evaluation"
MOST_FILMS = 8
LARGEST_FILM_BYTES = 2_000_000

_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,280px),1fr));gap:14px"


def evaluation_sections(run_dir: Path) -> list[tuple[str, str]]:
    """Return title and HTML of each section that the evaluations of a run are worth; none if there were none."""
    results = list(_read_results(run_dir / FOLDER))
    if not results:
        return []
    tables = "".join(_table(result) for result in results)
    sections = [("Success in simulation", tables)]
    films = [path for result in results for path in result.videos]
    shown = [film for path in films[:MOST_FILMS] if (film := _film(run_dir / FOLDER / "videos" / path.name))]
    if shown:
        sections.append(("The policy acting", f'<div style="{_GRID}">{"".join(shown)}</div>'))
    return sections


def _read_results(folder: Path) -> Iterator[EvaluationResult]:
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("step-"):
            continue  # of a callback: their rates are curves already
        try:
            yield EvaluationResult.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError):
            continue


def _table(result: EvaluationResult) -> str:
    rates = result.tasks if len(result.tasks) == 1 else [*result.tasks, result.total]
    rows = "".join(_row(rate) for rate in rates)
    note = f"{result.total.episodes} episodes of the {escape(result.split)} split, seed {result.seed}"
    if "policy_ms_p99" in result.timing:
        note += f"; the policy takes {result.timing['policy_ms_mean']:.2f} ms a step"
    heads = "".join(
        f'<th scope="col"{" class=number" if place else ""}>{text}</th>'
        for place, text in enumerate(("Environment", "Succeeded", "Rate", "95 % interval", "Mean steps"))
    )
    return (
        f'<div class="panel" style="margin-bottom:14px"><table><thead><tr>{heads}'
        f'<th scope="col" style="width:30%"></th></tr></thead><tbody>{rows}</tbody></table>'
        f'<p class="none">{note}</p></div>'
    )


def _row(rate: Rate) -> str:
    low, high = rate.interval
    cells = (f"{rate.successes}/{rate.episodes}", f"{rate.success:.1%}", f"{low:.1%} to {high:.1%}")
    numbers = "".join(f'<td class="number">{text}</td>' for text in (*cells, f"{rate.mean_steps:.0f}"))
    bar = (
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" style="width:100%;height:12px" role="img" '
        f'aria-label="{rate.success:.0%}"><rect width="100" height="10" rx="2" fill="var(--grid)"></rect>'
        f'<rect width="{rate.success * 100:.2f}" height="10" rx="2" fill="var(--c2)"></rect>'
        f'<path d="M{low * 100:.2f} 5H{high * 100:.2f}" stroke="var(--ink)" stroke-width="1.5"></path></svg>'
    )
    return f'<tr><th scope="row">{escape(rate.name)}</th>{numbers}<td>{bar}</td></tr>'


def _film(path: Path) -> str | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) > LARGEST_FILM_BYTES:
        return None
    data = base64.b64encode(content).decode()
    name, _, outcome = path.stem.rpartition("-")
    return (
        '<figure class="chart"><video autoplay loop muted playsinline controls style="width:100%;border-radius:6px" '
        f'src="data:video/mp4;base64,{data}"></video>'
        f"<figcaption><h3>{escape(name)}</h3><span>{escape(outcome)}</span></figcaption></figure>"
    )
