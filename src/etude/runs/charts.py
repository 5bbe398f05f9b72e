"""Curves as inline SVG: drawn here in both scales, so that the page needs no script to be read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 28
# 300 buckets on 488 px: two points for every three pixels, beyond which no eye sees a difference.
MOST_BUCKETS = 300
SMOOTH_FROM_POINTS = 60
SMOOTHING_WINDOW = 1 / 40
MARK_UP_TO_POINTS = 40
# Differences of larger values overflow; such a curve is broken in any case.
LARGEST_VALUE = 1e300


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps at which it was logged."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]

    def finite(self) -> Series:
        """Return the series without NaN and infinities."""
        pairs = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if _can_draw(value)]
        return Series(self.name, [step for step, _ in pairs], [value for _, value in pairs])

    def broken_steps(self) -> list[float]:
        """Return the steps whose value is NaN or infinite."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not _can_draw(value)]


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """Map a value to 0..1."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        return ((math.log10(value) if self.log else value) - low) / (high - low)


def downsample(steps: Sequence[float], values: Sequence[float], buckets: int = MOST_BUCKETS) -> list[int]:
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


def format_number(value: float) -> str:
    """Write a value for people: `0.0123`, `1,234`, `1.2e-05`."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def format_step(step: float, largest: float) -> str:
    """Write a step for an axis that ends at `largest`: `500`, `20k`, `1.5M`."""
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= limit:
            return f"{step / unit:g}{suffix}" if step else "0"
    return f"{step:g}"


def draw_chart(title: str, series: Sequence[Series], best: tuple[float, float] | None = None) -> str:
    """Draw one figure: title, last values, curve in linear and logarithmic scale, range."""
    finite = [line for line in (one.finite() for one in series) if line.values]
    broken = sorted({step for one in series for step in one.broken_steps()})
    if not finite:
        return (
            f'<figure class="chart"><figcaption><h3>{escape(title)}</h3></figcaption>'
            f'<p class="none">every value is NaN or infinite</p></figure>'
        )
    x = _axis_of([*broken, *(step for line in finite for step in line.steps)], pad=0.0)
    values = [value for line in finite for value in line.values]
    scales = {"linear": _axis_of(values, pad=0.06)}
    if min(values) > 0:
        scales["log"] = _log_axis_of(values)
    drawn = "".join(_draw_scale(name, x, y, finite, best) for name, y in scales.items())
    marks = "".join(f'<path class="broken" d="M{_px(x, step):.1f} {HEIGHT - BOTTOM}v-7"/>' for step in broken[:200])
    data = {
        "x": [x.low, x.high],
        **{name: [y.low, y.high] for name, y in scales.items()},
        "lines": [_points(line) for line in finite],
        "names": [line.name for line in finite],
    }
    return (
        f'<figure class="chart{"" if "log" in scales else " linear-only"}">'
        f"<figcaption><h3>{escape(title)}</h3>{_legend(finite)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(_describe(title, finite))}" '
        f'data-curve="{escape(json.dumps(data, separators=(",", ":")))}">{drawn}{marks}'
        '<g class="cursor" visibility="hidden"><path/></g></svg>'
        f'<p class="range">{_range_note(finite, broken, best)}</p></figure>'
    )


def _draw_scale(name: str, x: _Axis, y: _Axis, lines: Sequence[Series], best: tuple[float, float] | None) -> str:
    grid = []
    for tick in (log_ticks if y.log else linear_ticks)(y.low, y.high):
        at = _py(y, tick)
        grid.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        grid.append(f'<text x="{LEFT - 8}" y="{at + 3.5:.1f}" text-anchor="end">{format_number(_tidy(tick))}</text>')
    for tick in linear_ticks(x.low, x.high, most=6):
        at = _px(x, tick)
        grid.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{format_step(_tidy(tick), x.high)}</text>'
        )
    curves = "".join(_draw_line(index, line, x, y) for index, line in enumerate(lines))
    ring = f'<circle class="best" cx="{_px(x, best[0]):.1f}" cy="{_py(y, best[1]):.1f}" r="5"/>' if best else ""
    return f'<g class="{name}"><g class="grid">{"".join(grid)}</g>{curves}{ring}</g>'


def _draw_line(index: int, line: Series, x: _Axis, y: _Axis) -> str:
    chosen = downsample(line.steps, line.values)
    raw = [(_px(x, line.steps[i]), _py(y, line.values[i])) for i in chosen]
    smoothed = len(line.values) >= SMOOTH_FROM_POINTS and _is_rough(line.values)
    drawn = f'<path class="line{" raw" if smoothed else ""}" d="{_path(raw)}"/>'
    if smoothed:
        means = smooth(line.values)
        every = max(1, len(means) // (2 * MOST_BUCKETS))
        kept = [*range(0, len(means) - 1, every), len(means) - 1]
        drawn += f'<path class="line" d="{_path([(_px(x, line.steps[i]), _py(y, means[i])) for i in kept])}"/>'
    if len(raw) <= MARK_UP_TO_POINTS:
        drawn += "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6"/>' for px, py in raw)
    return f'<g class="c{index % 6}">{drawn}</g>'


def _is_rough(values: Sequence[float]) -> bool:
    # A schedule or a steady counter turns a handful of times; a noisy curve turns at every other point.
    rises = [later > earlier for earlier, later in itertools.pairwise(values)]
    turns = sum(one != other for one, other in itertools.pairwise(rises))
    return turns > len(values) / 5


def _legend(lines: Sequence[Series]) -> str:
    items = [
        f'<span class="c{index % 6}">{f"<b>{escape(line.name)}</b> " if len(lines) > 1 else ""}'
        f'<output data-line="{index}">{format_number(line.values[-1])}</output></span>'
        for index, line in enumerate(lines)
    ]
    return f'<span class="legend">{"".join(items)}<small class="at">last</small></span>'


def _range_note(lines: Sequence[Series], broken: Sequence[float], best: tuple[float, float] | None) -> str:
    parts = []
    if best:
        parts.append(f"best {format_number(best[1])} at step {format_number(best[0])}")
    if len(lines) == 1:
        parts.append(f"min {format_number(min(lines[0].values))}, max {format_number(max(lines[0].values))}")
    if broken:
        many = "value" if len(broken) == 1 else "values"
        parts.append(f"<strong>{len(broken)} {many} not finite, first at step {format_number(broken[0])}</strong>")
    return "; ".join(parts)


def _describe(title: str, lines: Sequence[Series]) -> str:
    parts = [
        f"{line.name} from {format_number(line.values[0])} to {format_number(line.values[-1])}, "
        f"min {format_number(min(line.values))}, max {format_number(max(line.values))}"
        for line in lines
    ]
    return f"Curve of {title}: {'; '.join(parts)}"


def _points(line: Series) -> list[list[float]]:
    chosen = downsample(line.steps, line.values)
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
    return LEFT + axis.position(step) * (WIDTH - LEFT - RIGHT)


def _py(axis: _Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _can_draw(value: float) -> bool:
    return abs(value) <= LARGEST_VALUE


def _tidy(tick: float) -> float:
    return float(f"{tick:.10g}")
