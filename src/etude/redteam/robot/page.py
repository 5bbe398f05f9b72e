"""The page of a stress test: what was found beside chance, where it begins, what it has in common, and films."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.redteam.robot.disturbances import DISTINCT, PLAUSIBLE
from etude.redteam.robot.results import RANDOM, StressEpisode, StressResult
from etude.runs.charts import Series, plan_chart
from etude.runs.durable import write_output
from etude.runs.page import format_number, format_percent, render
from etude.secrets import redact
from etude.simulation.failure_page import MAP, MARK_PATHS, Axes, MapScale, choose_axes
from etude.simulation.failures import rank_z
from etude.simulation.report import embed_film

PAGE = "stress.html"
MOST_LISTED, MOST_CARDS, MOST_CAUSES, CLEAR_Z = 200, 12, 8, 3.0
TITLES = {"cross_entropy": "cross-entropy", "adversary": "adversary", RANDOM: "chance"}
_MARKS = {"succeeded": ("circle", 2), "failed": ("cross", 1), "failed, by chance": ("triangle", 3)}


def write_page(result: StressResult, folder: Path) -> Path:
    """Write the page into a folder, and return where it is."""
    return write_output(folder / PAGE, render_page(result))


def render_page(result: StressResult) -> str:
    """Return the page as text; names of policies, environments and things are shown, never interpreted."""
    films = {path.name.rsplit("-", 2)[1]: film for path in result.videos if (film := embed_film(path))}
    likely = result.likeliest()
    settings = result.settings
    page = render(
        "redteam/robot/stress.html",
        title=f"Stress test of {settings['policy']}",
        facts=[f"in {settings['env']}, seed {settings['seed']}; disturbed by {_kinds(result)}"],
        tallies=_tally_rows(result),
        advantages=_advantages(result),
        chart=plan_chart("distinct failures by episode", _curves(result)),
        maps=_maps(result),
        key=[(name, *_MARKS[name]) for name in _counts(result)],
        counts=_counts(result),
        causes=_causes(result),
        cards=[_card(result, name, one, films.get(str(one.number))) for name, one in likely[:MOST_CARDS]],
        listed=[_listed(result, name, one) for name, one in likely[:MOST_LISTED]],
        found=len(likely),
        paths=MARK_PATHS,
        box=MAP,
        distinct=DISTINCT,
        plausible=1 - PLAUSIBLE,
    )
    return redact(page)


def _kinds(result: StressResult) -> str:
    shown = [kind if kind == "start" else f"{kind} ({value:g})" for kind, value in result.space.strengths.items()]
    return ", ".join(shown)


def _tally_rows(result: StressResult) -> tuple[list[str], list[list[str]]]:
    heads = ["Search", "Episodes", "Failures", "Distinct", "Of all episodes", "95 % interval", "Likeliest", "Median"]
    rows = [
        [
            TITLES.get(one.name, one.name), format_number(one.episodes), format_number(one.failures),
            format_number(one.distinct), format_percent(one.rate), " to ".join(map(format_percent, one.interval)),
            *("-" if value is None else format_percent(value) for value in (one.likeliest, one.median)),
        ]
        for one in result.tallies
    ]  # fmt: skip
    return heads, rows


def _advantages(result: StressResult) -> list[str]:
    found = []
    by_chance = len(result.searches.get(RANDOM, []))
    for name, episodes in result.searches.items():
        times = result.advantage(name)
        if name != RANDOM and times is not None and len(episodes) == by_chance:
            found.append(f"{TITLES.get(name, name)} found {times:.1f} times as many distinct failures as chance")
    return found


def _curves(result: StressResult) -> list[Series]:
    lines = []
    for place, (name, episodes) in enumerate(sorted(result.searches.items(), key=lambda pair: pair[0] == RANDOM)):
        failed = [(number, one.vector) for number, one in enumerate(episodes) if one.failed]
        taken = set(result.space.distinct(np.array([vector for _, vector in failed]))) if failed else set()
        new = {failed[number][0] for number in taken}
        counts = np.cumsum([number in new for number in range(len(episodes))]).tolist()
        steps = [float(number + 1) for number in range(len(episodes))]
        if steps:
            colour = 5 if name == RANDOM else place + 1
            lines.append(Series(TITLES.get(name, name), steps, [float(count) for count in counts], colour=colour))
    return lines


# ---- where they begin ------------------------------------------------------------------------------------------------


def _outcome(name: str, one: StressEpisode) -> str:
    return "succeeded" if not one.failed else "failed, by chance" if name == RANDOM else "failed"


def _counts(result: StressResult) -> dict[str, int]:
    found = [_outcome(name, one) for name, episodes in result.searches.items() for one in episodes]
    return {outcome: found.count(outcome) for outcome in _MARKS if outcome in found}


def _maps(result: StressResult) -> list[dict[str, Any]]:
    placed = [(name, one) for name, episodes in result.searches.items() for one in episodes if one.scene]
    axes = choose_axes([one.scene for _, one in placed])
    cards = {one.number for _, one in result.likeliest(MOST_CARDS)}
    return [_map(placed, pair, cards) for pair in axes]


def _map(placed: Sequence[tuple[str, StressEpisode]], axes: Axes, cards: set[int]) -> dict[str, Any]:
    scale = MapScale(*([one.scene[name] for _, one in placed] for name in axes))
    points = []
    for name, one in sorted(placed, key=lambda pair: pair[1].failed):  # failures lie on top
        outcome = _outcome(name, one)
        at = ", ".join(f"{axis} {format_number(one.scene[axis])}" for axis in axes)
        points.append({
            "at": scale.at(one.scene[axes[0]], one.scene[axes[1]]), "mark": _MARKS[outcome],
            "title": f"episode {one.number} ({TITLES.get(name, name)}): {outcome}; {at}",
            "anchor": _anchor(one) if one.number in cards else None,
        })  # fmt: skip
    thing = axes[0].removesuffix("_x") if axes[0].endswith("_x") else ""
    return {
        "title": f"Where the {thing} is at the beginning" if thing else "How they begin", "axes": axes,
        "points": points, "starts": [], "columns": scale.columns, "rows": scale.rows,
    }  # fmt: skip


# ---- what they have in common ----------------------------------------------------------------------------------------


def _causes(result: StressResult) -> tuple[list[str], list[list[str]]] | None:
    """Return the numbers by which failures differ most from successes, over all searches."""
    episodes = [one for found in result.searches.values() for one in found]
    failed = np.array([one.failed for one in episodes], bool)
    if failed.sum() < 5 or (~failed).sum() < 5:
        return None
    columns: dict[str, Any] = {}
    for number, name in enumerate(result.space.names):
        values = np.array([one.vector[number] for one in episodes])
        columns[name] = values
        if not result.space.is_uniform[number]:
            columns[f"size of {name}"] = np.abs(values)
    for name in episodes[0].scene:
        values = np.array([one.scene.get(name, np.nan) for one in episodes])
        if np.isfinite(values).all() and np.ptp(values) > 1e-9:
            columns[f"{name} at the beginning"] = values
    clear = sorted(
        ((rank_z(v[failed], v[~failed]), name) for name, v in columns.items()), key=lambda pair: -abs(pair[0])
    )
    rows = [
        [name, f"{np.median(columns[name][failed]):.3g}", f"{np.median(columns[name][~failed]):.3g}", f"{z:+.1f}"]
        for z, name in clear[:MOST_CAUSES]
        if abs(z) >= CLEAR_Z
    ]
    return (["", "In failures", "In successes", "How clearly (z)"], rows) if rows else None


# ---- one by one ------------------------------------------------------------------------------------------------------


def _anchor(one: StressEpisode) -> str:
    return f"episode-{one.number}"


def _card(result: StressResult, name: str, one: StressEpisode, film: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "anchor": _anchor(one), "number": one.number, "what": one.what or "failed", "film": film,
        "mark": _MARKS[_outcome(name, one)], "by": TITLES.get(name, name), "steps": one.steps,
        "plausibility": format_percent(one.plausibility), "log_likelihood": f"{one.log_likelihood:.2f}",
        "facts": result.space.tell(np.array(one.vector)),
    }  # fmt: skip


def _listed(result: StressResult, name: str, one: StressEpisode) -> list[str]:
    return [
        str(one.number), TITLES.get(name, name), format_percent(one.plausibility), f"{one.log_likelihood:.2f}",
        str(one.steps), one.what or "-", "; ".join(result.space.tell(np.array(one.vector))),
    ]  # fmt: skip
