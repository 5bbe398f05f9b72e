"""Curves as inline SVG: laid out here in both scales, so that the page needs no script to be read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.runs.page import format_number

BOX = (560, 230, 58, 14, 12, 28)  # page.js reads the same six
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = BOX
# 300 buckets on 488 px: two points for every three pixels, beyond which no eye sees a difference.
MOST_BUCKETS = 300
SMOOTH_FROM_POINTS = 60
SMOOTHING_WINDOW = 1 / 40
MARK_UP_TO_POINTS = 40
# The first points of a curve do not set its scale if it then is larger than that of the others by this factor.
DWARFED, FIRST_SHARE, DWARFED_FROM_POINTS = 4.0, 0.05, 8
COLOURS = 6
LEGEND_UP_TO = 8
"""Curves that a chart names and marks itself; of more, whoever shows it says which is which."""
# Differences of larger values overflow; such a curve is broken in any case.
LARGEST_VALUE = 1e300
_Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps at which it was logged."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    """The lower edge of a band about the curve, if it has one."""
    high: Sequence[float] = ()
    colour: int | None = None
    """Which colour it has; None takes that of its place in the chart."""

    def finite(self) -> Series:
        """Return the series without NaN and infinities."""
        if self.low:
            return self
        pairs = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if _can_draw(value)]
        return replace(self, steps=[step for step, _ in pairs], values=[value for _, value in pairs])

    def broken_steps(self) -> list[float]:
        """Return the steps whose value is NaN or infinite."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not _can_draw(value)]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """Map a value to 0..1; one beyond the axis lies at its end."""
        value = min(max(value, self.low), self.high)
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        return ((math.log10(value) if self.log else value) - low) / (high - low)


def robust_range(lines: Sequence[Series]) -> tuple[float, float, int]:
    """Return the range to show, and how many points lie beyond it: the first ones, where they dwarf the others."""
    edges = [edge for line in lines for edge in (line.values, line.low, line.high) if edge]
    values, later = [value for edge in edges for value in edge], [value for edge in edges for value in _later(edge)]
    low, high, inner_low, inner_high = min(values), max(values), min(later), max(later)
    if not inner_high > inner_low or high - low <= DWARFED * (inner_high - inner_low):
        return low, high, 0
    margin = 0.15 * (inner_high - inner_low)  # in which the second point of a fall is still seen
    inner_low, inner_high = max(low, inner_low - margin), min(high, inner_high + margin)
    return inner_low, inner_high, sum(not inner_low <= value <= inner_high for line in lines for value in line.values)


def _later(values: Sequence[float]) -> Sequence[float]:
    """Return all but the first one in twenty, which set the scale in any case."""
    count = len(values)
    return values if count < DWARFED_FROM_POINTS else values[math.ceil(count * FIRST_SHARE) :]


def downsample(values: Sequence[float], buckets: int = MOST_BUCKETS) -> list[int]:
    """Pick the indices to draw: the least and the greatest of each bucket, and both ends."""
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    chosen = {0, count - 1}
    for bucket in range(buckets):
        span = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        chosen.add(min(span, key=values.__getitem__))
        chosen.add(max(span, key=values.__getitem__))
    return sorted(chosen)


def smooth(values: Sequence[float], window: float = SMOOTHING_WINDOW) -> list[float]:
    """Average over a centred window (a fraction of the curve), which does not lag behind a falling loss."""
    sums = [0.0, *itertools.accumulate(values)]
    half = max(2, round(len(values) * window / 2))
    smoothed = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        smoothed.append((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))
    return smoothed


def smoothed_if_rough(values: Sequence[float]) -> Sequence[float]:
    """Return a curve that turns at every other point smoothed, and any other as it is."""
    return smooth(values) if len(values) >= SMOOTH_FROM_POINTS and _is_rough(values) else values


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between `low` and `high`."""
    raw = (high - low) / most
    if not raw > 0 or not math.isfinite(raw):
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / width - 1e-9)
    return [index * width for index in range(first, math.floor(high / width + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return powers of ten between `low` and `high`, with 2 and 5 between them where there is room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / most))
    for factors in ((1,), (1, 2, 5)):
        ticks = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
        inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) >= 3:
            return inside
    return [tick for tick in linear_ticks(low, high) if tick > 0]


def _step_ticks(x: _Axis) -> list[float]:
    """Return round steps of an axis; there is no half of one, unless nothing else is on it."""
    ticks = linear_ticks(x.low, x.high, most=6)
    whole = [tick for tick in ticks if _tidy(tick).is_integer()]
    return whole if len(whole) > 1 else ticks


def _label(tick: float) -> str:
    """Write a value for an axis: `1.25e-5`, as eight characters reach out of a card that is as wide as a phone."""
    mantissa, sign, exponent = format_number(_tidy(tick)).partition("e")
    return f"{mantissa}e{int(exponent)}" if sign else mantissa


def format_step(step: float, largest: float) -> str:
    """Write a step for an axis that ends at `largest`: `500`, `20k`, `1.5M`."""
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= limit:
            return f"{step / unit:g}{suffix}" if step else "0"
    return f"{step:g}"


def plan_chart(
    title: str, series: Sequence[Series], best: _Point | None = None, *, buckets: int = MOST_BUCKETS
) -> dict[str, Any]:
    """Return what chart.html shows as `chart`: last values, curves in linear and logarithmic scale, range.

    Args:
        title: What is measured.
        series: A curve each; bands where they have them.
        best: The point to mark.
        buckets: How finely curves are drawn; pages of many curves take less.
    """
    lines = [
        line if line.colour is not None else replace(line, colour=place)
        for place, line in enumerate(one.finite() for one in series)
        if line.values
    ]
    broken = sorted({step for one in series for step in one.broken_steps()})
    chart = {"title": title, "lines": lines, "box": BOX, "scales": {}, "broken": broken, "colours": COLOURS}
    chart |= {"named": len(lines) <= LEGEND_UP_TO, "beyond": ""}
    if not lines:
        return {**chart, "note": "every value is NaN or infinite", "broken": ()}
    x = _axis_of([*broken, *(step for line in lines for step in line.steps)], pad=0.0)
    values = [value for line in lines for value in (*line.values, *line.low, *line.high)]
    low, high, beyond = robust_range(lines)
    axes = {"linear": _axis_of([low, high], pad=0.06)} | ({"log": _log_axis_of(values)} if min(values) > 0 else {})
    data = {"box": BOX, "x": [x.low, x.high], **{name: [y.low, y.high] for name, y in axes.items()}}
    return {
        **chart,
        "note": _range_note(lines, best),
        "beyond": _beyond_note(lines, beyond, "log" in axes),
        "broken_at": [_px(x, step) for step in broken[:200]],
        "scales": {name: _plan_scale(x, y, lines, best, buckets) for name, y in axes.items()},
        "description": _describe(title, lines),
        "data": json.dumps({**data, "lines": [_points(line, buckets) for line in lines]}, separators=(",", ":")),
    }


@dataclass(frozen=True, slots=True)
class Dot:
    """One point of a scatter plot."""

    x: float
    y: float
    kind: str
    """The class of its style."""
    note: str
    """What is said where a pointer rests on it."""


def plan_scatter(
    title: str, dots: Sequence[Dot], *, is_large: bool, categories: Sequence[str] = (), log_x: bool = False,
    trace: Sequence[_Point] = (),
) -> dict[str, Any]:  # fmt: skip
    """Return what scatter.html shows as `plot`: points that are not one curve.

    Args:
        title: What lies along the horizontal axis.
        dots: The points; x counts categories from 0 where there are any.
        is_large: Whether more is better: what is far off on the other side does not set the scale.
        categories: Names of the places on the horizontal axis, in place of numbers.
        log_x: Draw the horizontal axis logarithmically.
        trace: A line through the plot, as steps.
    """
    xs = [dot.x for dot in dots]
    x = _Axis(-0.5, len(categories) - 0.5) if categories else _log_axis_of(xs) if log_x else _axis_of(xs, pad=0.04)
    limit = tame_limit([dot.y for dot in dots], is_large)
    beyond = sum(dot.y < limit if is_large else dot.y > limit for dot in dots)
    y = _axis_of([max(dot.y, limit) if is_large else min(dot.y, limit) for dot in dots], pad=0.06)
    if categories:
        columns = [(_px(x, place), name) for place, name in enumerate(categories)]
    else:
        ticks = log_ticks(x.low, x.high) if log_x else linear_ticks(x.low, x.high, most=6)
        columns = [(_px(x, tick), _label(tick)) for tick in ticks]
    stairs = [(_px(x, step), _py(y, value)) for step, value in trace]
    path = "".join(f"H{left}V{top}" for left, top in stairs[1:])
    return {
        "title": title,
        "box": BOX,
        "rows": [(_py(y, tick), _label(tick)) for tick in linear_ticks(y.low, y.high)],
        "columns": columns,
        "dots": [(_px(x, dot.x), _py(y, dot.y), dot.kind, dot.note) for dot in dots],
        "trace": f"M{stairs[0][0]} {stairs[0][1]}{path}" if stairs else "",
        "beyond": f"{beyond} {'points' if beyond > 1 else 'point'} beyond the scale, at its edge" if beyond else "",
        "description": f"{title}: {len(dots)} points from {format_number(min(dot.y for dot in dots))} "
        f"to {format_number(max(dot.y for dot in dots))}",
    }


def tame_limit(values: Sequence[float], is_large: bool) -> float:
    """Return how bad a value may be and still set the scale: as far from the median as four times the best ones are."""
    ordered = sorted(values, reverse=is_large)
    best, middle = ordered[0], ordered[len(ordered) // 2]
    limit = middle + (DWARFED * (middle - best) or math.inf * (-1 if is_large else 1))
    return max(limit, ordered[-1]) if is_large else min(limit, ordered[-1])


def _beyond_note(lines: Sequence[Series], beyond: int, has_log: bool) -> str:
    if not beyond:
        return ""
    value = format_number(max((value for line in lines for value in line.values), key=abs))
    points = f"{beyond} points" if beyond > 1 else "1 point"
    return f"{points} beyond the scale, the furthest {value}{'; the logarithmic scale shows all' if has_log else ''}"


def _plan_scale(x: _Axis, y: _Axis, lines: Sequence[Series], best: _Point | None, buckets: int) -> dict[str, Any]:
    ticks = (log_ticks if y.log else linear_ticks)(y.low, y.high)
    return {
        "rows": [(_py(y, tick), _label(tick)) for tick in ticks],
        "columns": [(_px(x, tick), format_step(_tidy(tick), x.high)) for tick in _step_ticks(x)],
        "curves": [_plan_curve(line, x, y, buckets, marked=len(lines) <= LEGEND_UP_TO) for line in lines],
        "best": (_px(x, best[0]), _py(y, best[1])) if best else None,
    }


def _plan_curve(line: Series, x: _Axis, y: _Axis, buckets: int, *, marked: bool) -> dict[str, Any]:
    raw = [(_px(x, line.steps[i]), _py(y, line.values[i])) for i in downsample(line.values, buckets)]
    smoothed: list[_Point] = []
    # What lies beyond the scale is not to draw its neighbours there.
    inside = line.values if line.low else [min(max(value, y.low), y.high) for value in line.values]
    means = inside if line.low else smoothed_if_rough(inside)
    if means is not inside:
        every = max(1, len(means) // (2 * buckets))
        kept = [*range(0, len(means) - 1, every), len(means) - 1]
        smoothed = [(_px(x, line.steps[i]), _py(y, means[i])) for i in kept]
    marks = raw if marked and len(raw) <= MARK_UP_TO_POINTS else []
    edges = [
        [(_px(x, step), _py(y, value)) for step, value in zip(line.steps, edge, strict=True)]
        for edge in (line.low, line.high)
        if edge
    ]
    band = _path([*edges[1], *reversed(edges[0])]) + "Z" if edges else ""
    return {"path": _path(raw), "smoothed": _path(smoothed), "marks": marks, "band": band, "colour": line.colour}


def _is_rough(values: Sequence[float]) -> bool:
    # A schedule or a steady counter turns a handful of times; a noisy curve turns at every other point.
    rises = [later > earlier for earlier, later in itertools.pairwise(values)]
    turns = sum(one != other for one, other in itertools.pairwise(rises))
    return turns > len(values) / 5


def _range_note(lines: Sequence[Series], best: _Point | None) -> str:
    parts = []
    if best:
        parts.append(f"best {format_number(best[1])} at step {format_number(best[0])}")
    if len(lines) == 1:
        parts.append(f"min {format_number(min(lines[0].values))}, max {format_number(max(lines[0].values))}")
    return "; ".join(parts)


def _describe(title: str, lines: Sequence[Series]) -> str:
    parts = [
        f"{line.name} from {format_number(line.values[0])} to {format_number(line.values[-1])}, "
        f"min {format_number(min(line.values))}, max {format_number(max(line.values))}"
        for line in lines
    ]
    return f"Curve of {title}: {'; '.join(parts)}"


def _points(line: Series, buckets: int) -> list[list[float]]:
    chosen = downsample(line.values, buckets)
    return [[line.steps[i] for i in chosen], [float(f"{line.values[i]:.6g}") for i in chosen]]


def _axis_of(values: Sequence[float], pad: float) -> _Axis:
    low, high = min(values), max(values)
    if not high > low:
        half = abs(low) * 0.1 or 0.5
        return _Axis(low - half, high + half)
    margin = (high - low) * pad
    # A curve that never goes below zero keeps zero as its floor.
    return _Axis(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin)


def _log_axis_of(values: Sequence[float]) -> _Axis:
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = (high - low) * 0.06 or 0.05
    return _Axis(10 ** max(low - margin, -307.0), 10 ** min(high + margin, 307.0), log=True)


def _px(axis: _Axis, step: float) -> float:
    return round(LEFT + axis.position(step) * (WIDTH - LEFT - RIGHT), 1)


def _py(axis: _Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM), 1)


def _path(points: Sequence[_Point]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points) if points else ""


def _can_draw(value: float) -> bool:
    return abs(value) <= LARGEST_VALUE


def _tidy(tick: float) -> float:
    return float(f"{tick:.10g}")
