"""The part of a report that tells why episodes failed: groups, maps of where they begin, a chart and a film of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from etude.runs.charts import Series, linear_ticks, plan_chart
from etude.runs.page import format_number, render
from etude.secrets import redact
from etude.simulation.diagnosis import Diagnosis, EnvironmentDiagnosis
from etude.simulation.traces import Array, EpisodeTrace

MOST_CARDS, MOST_GROUPS, MOST_LISTED, MOST_ENVIRONMENTS = 12, 6, 200, 12
MAP = (360, 300, 48, 12, 12, 38)
"""Width and height of a map, and what is left free at the left, right, top and bottom."""
COLOURS = (1, 3, 4, 0, 5)
SHAPES = ("cross", "triangle", "square", "diamond", "plus")
_R = 4.6
MARK_PATHS = {
    "circle": f"m-{_R} 0a{_R} {_R} 0 1 0 {2 * _R} 0a{_R} {_R} 0 1 0 -{2 * _R} 0z",
    "cross": "m-4.5 -4.5l9 9m0 -9l-9 9",
    "triangle": "m0 -5.5l5.4 9.6h-10.8z",
    "square": "m-4.2 -4.2h8.4v8.4h-8.4z",
    "diamond": "m0 -6l5 6l-5 6l-5 -6z",
    "plus": "m0 -5.6v11.2m-5.6 -5.6h11.2",
    "dot": "m-2.4 0a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0 -4.8 0z",
}

Film = dict[str, str]
Axes = tuple[str, str]


def failure_section(diagnosis: Diagnosis, films: Mapping[tuple[str, int], Film]) -> str:
    """Return the HTML of a diagnosis; nothing if no episode failed.

    Args:
        diagnosis: What was found.
        films: The films of failures, by environment and episode.
    """
    failed = [one for one in diagnosis.environments if one.groups]
    if not failed:
        return ""
    shown = [_plan_environment(one, films) for one in failed[:MOST_ENVIRONMENTS]]
    return render(
        "simulation/failures.html",
        environments=shown,
        several=len(diagnosis.environments) > 1,
        paths=MARK_PATHS,
        box=MAP,
    )


def _plan_environment(one: EnvironmentDiagnosis, films: Mapping[tuple[str, int], Film]) -> dict[str, Any]:
    marks = _marks(one)
    titles = {number: group.title for group in one.groups for number in group.episodes}
    cards = []
    for finding in _choose_cards(one, films):
        trace = one.traces.get(finding.episode)
        cards.append({
            "anchor": _anchor(one.env, finding.episode), "episode": finding.episode, "title": finding.title,
            "mark": marks[finding.episode], "facts": finding.facts, "film": films.get((one.env, finding.episode)),
            "charts": [] if trace is None else plan_charts(trace, one.limits.distance),
        })  # fmt: skip
    groups = [
        {"mark": marks[group.episodes[0]], "count": len(group.episodes), "title": group.title, "note": group.note}
        for group in one.groups
    ]
    listed = {card["episode"]: card["anchor"] for card in cards}
    return {
        "env": redact(one.env), "groups": groups[:MOST_GROUPS], "more_groups": max(0, len(groups) - MOST_GROUPS),
        "failures": sum(row.success is False for row in one.rows), "episodes": len(one.rows),
        "successes": sum(row.success is True for row in one.rows), "demonstrated": len(one.starts),
        "maps": [_plan_map(one, axes, marks, titles, listed) for axes in choose_axes(list(one.scenes.values()))],
        "cards": cards, "findings": one.findings[:MOST_LISTED], "listed": listed, "notes": _notes(one),
    }  # fmt: skip


def _marks(one: EnvironmentDiagnosis) -> dict[int, tuple[str, int]]:
    """Return shape and colour of each episode."""
    marks = {row.episode: ("circle", 2) for row in one.rows}
    for place, group in enumerate(one.groups):
        for number in group.episodes:
            marks[number] = SHAPES[place % len(SHAPES)], COLOURS[place % len(COLOURS)]
    return marks


def _choose_cards(one: EnvironmentDiagnosis, films: Mapping[tuple[str, int], Film]) -> list[Any]:
    """Return the failures that are shown one by one: those with films, then some of each group in turn."""
    by_number = {finding.episode: finding for finding in one.findings}
    turns = [number for row in zip_longest(*(group.episodes for group in one.groups)) for number in row]
    order = [number for number in turns if number is not None]
    order.sort(key=lambda number: (one.env, number) not in films)
    return [by_number[number] for number in order[:MOST_CARDS]]


def _anchor(env: str, episode: int) -> str:
    plain = "".join(character if character.isalnum() else "-" for character in env)
    return f"why-{plain}-{episode}"


def _notes(one: EnvironmentDiagnosis) -> list[str]:
    limit, notes = one.limits.distance, []
    if one.missing:
        notes.append(f"No distance to the demonstrations: {redact(one.missing)}.")
    elif limit is not None:
        notes.append(
            "The distance is that of the state to the nearest demonstrated one, in deviations of each number; pictures "
            f"are not compared. Beyond {format_number(limit)} is far: 99 % {one.limits.distance_from} are nearer."
        )
    known = list(one.traces.values())
    if not any(np.isfinite(trace.disagreement).any() for trace in known):
        notes.append("Plans do not overlap here, so there is nothing that they could disagree about.")
    if not any(np.isfinite(trace.uncertainty).any() for trace in known):
        notes.append("There is no uncertainty over samples: only policies that draw their plans have one.")
    return notes


# ---- charts ----------------------------------------------------------------------------------------------------------


def plan_charts(trace: EpisodeTrace, limit: float | None) -> list[dict[str, Any]]:
    """Return the charts of an episode: how far, how torn and how unsure; and what was done beside what was planned."""
    measures = [("distance", trace.distance, 1), ("disagreement", trace.disagreement, 3)]
    measures.append(("uncertainty", trace.uncertainty, 0))
    lines = [line for name, values, colour in measures if (line := _series(name, trace.steps, values, colour))]
    if limit is not None and lines and lines[0].name == "distance":
        ends = [float(trace.steps[0]), float(trace.steps[-1])]
        lines.append(Series("far", ends, [limit, limit], colour=5))
    charts = [plan_chart("in deviations, by step", lines)] if lines else []
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(trace.planned - trace.action)) if trace.planned.size else np.zeros((0, 0))
    if apart.size and apart.max() > 1e-5:
        worst = int(apart.max(0).argmax())
        done = _series("done", trace.steps, trace.action[:, worst], 1)
        planned = _series("newest plan", trace.steps, trace.planned[:, worst], 0)
        charts.append(plan_chart(f"action {worst}, done and planned", [line for line in (done, planned) if line]))
    return charts


def _series(name: str, steps: Array, values: Array, colour: int) -> Series | None:
    known = np.isfinite(values)
    if not known.any():
        return None
    return Series(name, steps[known].tolist(), [float(f"{value:.4g}") for value in values[known]], colour=colour)


# ---- maps ------------------------------------------------------------------------------------------------------------


def choose_axes(scenes: Sequence[Mapping[str, float]]) -> list[Axes]:
    """Return what to draw beginnings by: x and y of the two things that are placed most differently.

    Where nothing has an x and a y, the two numbers that vary most; nothing where fewer than two vary.
    """
    if len(scenes) < 2:
        return []
    names = [name for name in scenes[0] if all(math.isfinite(scene.get(name, math.nan)) for scene in scenes)]
    spans = {name: max(one[name] for one in scenes) - min(one[name] for one in scenes) for name in names}
    moving = {name: span for name, span in spans.items() if span > 1e-6}
    places = [(name, f"{name[:-1]}y") for name in moving if name.endswith("_x") and f"{name[:-1]}y" in moving]
    places = [axes for axes in places if "_from_" not in axes[0] and not axes[0].startswith("previous_")]
    if places:
        return sorted(places, key=lambda axes: -moving[axes[0]] * moving[axes[1]])[:2]
    deviations = {name: float(np.std([scene[name] for scene in scenes])) for name in moving}
    most = sorted(moving, key=lambda name: -deviations[name])[:2]
    return [(most[0], most[1])] if len(most) == 2 else []


def _plan_map(
    one: EnvironmentDiagnosis,
    axes: Axes,
    marks: Mapping[int, tuple[str, int]],
    titles: Mapping[int, str],
    anchors: Mapping[int, str],
) -> dict[str, Any]:
    starts = [start for start in one.starts if all(math.isfinite(start.get(name, math.nan)) for name in axes)]
    everything = [*one.scenes.values(), *starts]
    place = MapScale(*([scene[name] for scene in everything] for name in axes))
    points = []
    for row in sorted(one.rows, key=lambda row: row.success is False):  # failures lie on top
        scene, told = one.scenes[row.episode], titles.get(row.episode, "succeeded")
        at = ", ".join(f"{name} {format_number(scene[name])}" for name in axes)
        points.append({
            "at": place.at(scene[axes[0]], scene[axes[1]]), "mark": marks[row.episode],
            "title": f"episode {row.episode}: {told}; {at}", "anchor": anchors.get(row.episode),
        })  # fmt: skip
    thing = axes[0].removesuffix("_x") if axes[0].endswith("_x") else ""
    return {
        "title": f"Where the {thing} is at the beginning" if thing else "How they begin", "axes": axes,
        "points": points, "starts": [place.at(start[axes[0]], start[axes[1]]) for start in starts],
        "columns": place.columns, "rows": place.rows,
    }  # fmt: skip


class MapScale:
    """Places values on a map; x and y of a place have the same scale where the map then is not mostly empty."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        width, height, left, right, top, bottom = MAP
        self._size = width - left - right, height - top - bottom
        spans = [max(values) - min(values) for values in (xs, ys)]
        units = [span * 1.12 / size for span, size in zip(spans, self._size, strict=True)]
        if max(units) < 4 * min(units):
            units = [max(units)] * 2
        self._low = [
            (max(values) + min(values)) / 2 - unit * size / 2
            for values, unit, size in zip((xs, ys), units, self._size, strict=True)
        ]
        self._units = units
        ends = [low + unit * size for low, unit, size in zip(self._low, units, self._size, strict=True)]
        self.columns = [(self.at(tick, ys[0])[0], format_number(tick)) for tick in _ticks(self._low[0], ends[0])]
        self.rows = [(self.at(xs[0], tick)[1], format_number(tick)) for tick in _ticks(self._low[1], ends[1])]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point lies on the picture."""
        _, height, left, _, _, bottom = MAP
        across, up = ((value - low) / unit for value, low, unit in zip((x, y), self._low, self._units, strict=True))
        return round(left + across, 1), round(height - bottom - up, 1)


def _ticks(low: float, high: float) -> list[float]:
    return [float(f"{tick:.10g}") for tick in linear_ticks(low, high)]
