"""A dataset at a glance: how its numbers are distributed, where its episodes begin, and which of them look odd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot import oddities
from etude.data.lerobot.oddities import Bounds, Mark, UsualRange

Array = NDArray[Any]

SURVEY_FORMAT: Final = 1
"""Part of the key under which a survey is kept: raised when the rules change."""
MOST_DIMENSIONS: Final = 128
"""Dimensions of a feature that are looked at; a note says how many are left out."""
MOST_MARKS: Final = 8
"""What is said about one episode, the worst first."""
BINS: Final = 40
SHOWN_SHARE: Final = 0.005
"""This share of the values at either end may lie beyond a histogram, if they would dwarf the others."""
_REPEATED_SHARE: Final = 0.2


@dataclass(frozen=True)
class Table:
    """The numbers of a dataset, row by row, episode after episode."""

    lengths: Array
    fps: float
    timestamps: Array
    frame_index: Array
    tasks: Array
    """Task of each episode, by index."""
    columns: Mapping[str, Array]
    """Every feature that is numbers, as (rows, dimensions)."""
    labels: Mapping[str, Sequence[str]]

    @property
    def states(self) -> dict[str, Array]:
        """What was observed."""
        return {name: values for name, values in self.columns.items() if name.startswith("observation")}

    @property
    def actions(self) -> dict[str, Array]:
        """What was done."""
        return {name: values for name, values in self.columns.items() if name.split(".")[0] == "action"}


@dataclass(frozen=True)
class Distribution:
    """The values of one dimension over the whole dataset."""

    feature: str
    label: str
    place: int
    """Which dimension of the feature it is."""
    least: float
    middle: float
    greatest: float
    low: float
    """Where the histogram begins."""
    high: float
    counts: list[int]
    beyond: int = 0
    """Values outside of the histogram."""
    broken: int = 0
    """Values that are NaN or infinite."""

    @property
    def is_constant(self) -> bool:
        """Whether there is one value alone."""
        return self.least == self.greatest


@dataclass(frozen=True)
class Coverage:
    """Where episodes begin: their first states on the plane in which they differ most."""

    x: list[float | None]
    """None where the first state is not finite."""
    y: list[float | None]
    x_title: str
    y_title: str


@dataclass(frozen=True)
class Survey:
    """What a look over all frames has found."""

    distributions: list[Distribution]
    coverage: Coverage | None
    marks: dict[int, list[Mark]] = field(default_factory=dict)
    """What is odd, by episode, the worst first."""
    notes: list[str] = field(default_factory=list)
    """What holds for the dataset as a whole."""

    def with_marks(self, more: Iterable[Mark]) -> Survey:
        """Return the survey with further marks."""
        return replace(self, marks=_by_episode([*(mark for one in self.marks.values() for mark in one), *more]))

    def to_values(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        values = asdict(self)
        values["marks"] = [list(mark) for marks in self.marks.values() for mark in marks]
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_values` returned."""
        coverage = values["coverage"]
        return cls(
            [Distribution(**one) for one in values["distributions"]],
            None if coverage is None else Coverage(**coverage),
            _by_episode([Mark(*mark) for mark in values["marks"]]),
            list(values["notes"]),
        )


def survey(table: Table, advance: Callable[[int, int], None] = lambda done, total: None) -> Survey:
    """Look over all frames; pictures are not touched.

    Args:
        table: The numbers.
        advance: Called with how many dimensions of how many are done.
    """
    bounds = Bounds(table.lengths, table.tasks)
    marks: list[Mark] = []
    distributions: list[Distribution] = []
    notes: list[str] = []
    watched = {**table.states, **table.actions}
    shown = {name: min(values.shape[1], MOST_DIMENSIONS) for name, values in table.columns.items()}
    done, total = 0, sum(shown.values())
    for name, values in table.columns.items():
        if values.shape[1] > MOST_DIMENSIONS:
            notes.append(
                f"{name} has {values.shape[1]:,} dimensions, of which the first {MOST_DIMENSIONS} are surveyed"
            )
        for place in range(shown[name]):
            label, column = table.labels[name][place], np.array(values[:, place], dtype=np.float64)
            marks += oddities.find_broken(column, bounds, name, label)
            column[~np.isfinite(column)] = np.nan
            np.clip(column, -oddities.LARGEST, oddities.LARGEST, out=column)
            sample = column[bounds.sample]
            scale = oddities.scale_of(sample[np.isfinite(sample)])
            if scale is not None:
                distributions.append(_distribute(column, bounds, name, label, place, scale))
                if name in watched and not distributions[-1].is_constant:
                    marks += _judge(column, bounds, scale, name, label)
            done += 1
            advance(done, total)
    marks += oddities.find_lengths(bounds, table.fps)
    marks += oddities.find_misfit_time(table.timestamps, table.frame_index, bounds, table.fps)
    marks += oddities.find_copies(watched, bounds)
    states, actions = list(table.states.values()), list(table.actions.values())
    marks += oddities.find_repeats(states, actions, bounds, table.fps)
    notes += _notes(distributions, oddities.share_repeated([*states, *actions], bounds))
    return Survey(distributions, cover(table.states, table.labels, bounds), _by_episode(marks), notes)


def _judge(column: Array, bounds: Bounds, scale: UsualRange, name: str, label: str) -> Iterable[Mark]:
    yield from oddities.find_jumps(column, bounds, scale, name, label)
    yield from oddities.find_beyond(column, bounds, scale, name, label)
    yield from oddities.find_constant(column, bounds, name, label)


def _notes(distributions: Sequence[Distribution], repeated: float) -> list[str]:
    notes = []
    constant: dict[str, list[str]] = {}
    for one in distributions:
        if one.is_constant:
            constant.setdefault(one.feature, []).append(one.label)
    for name, labels in constant.items():
        some = ", ".join(labels[:12]) + (f" and {len(labels) - 12} more" if len(labels) > 12 else "")
        notes.append(f"{name} is the same in every frame in {some}")
    if repeated > _REPEATED_SHARE:
        notes.append(f"{repeated:.0%} of all frames repeat the states and actions of the frame before")
    return notes


def _by_episode(marks: Iterable[Mark]) -> dict[int, list[Mark]]:
    """Join marks of one kind and feature, and keep the worst of each episode."""
    grouped: dict[tuple[int, str, str], list[Mark]] = {}
    for mark in marks:
        grouped.setdefault((mark.episode, mark.kind, mark.feature), []).append(mark)
    found: dict[int, list[Mark]] = {}
    for (episode, _, _), members in sorted(grouped.items(), key=lambda item: item[0][0]):
        members.sort(key=lambda mark: -mark.weight)
        others = [mark.label for mark in members[1:]]
        worst = members[0]
        if others:
            more = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
            worst = worst._replace(text=f"{worst.text}; also {more}")
        found.setdefault(episode, []).append(worst)
    return {episode: sorted(some, key=lambda mark: -mark.weight)[:MOST_MARKS] for episode, some in found.items()}


def _distribute(column: Array, bounds: Bounds, name: str, label: str, place: int, scale: UsualRange) -> Distribution:
    finite = np.isfinite(column)
    held = column if finite.all() else column[finite]
    sample = column[bounds.sample]
    sample = sample[np.isfinite(sample)]
    least, greatest = float(held.min()), float(held.max())
    low, high = (float(edge) for edge in np.quantile(sample, (SHOWN_SHARE, 1 - SHOWN_SHARE)))
    margin = 0.15 * (high - low)
    # All is shown, unless a few values would squeeze the others into a third.
    if not high > low or greatest / 3 - least / 3 <= high - low:
        low, high = least, greatest
    else:
        low, high = max(least, low - margin), min(greatest, high + margin)
    if not high > low:
        counts = [len(sample)]
    else:
        places = (sample - low) / (high - low)
        counts = np.histogram(places[(places >= 0) & (places <= 1)], bins=BINS, range=(0.0, 1.0))[0].tolist()
    beyond = int(((held < low) | (held > high)).sum())
    return Distribution(
        name, label, place, least, scale.middle, greatest, low, high, counts, beyond, int(len(column) - len(held))
    )


def cover(states: Mapping[str, Array], labels: Mapping[str, Sequence[str]], bounds: Bounds) -> Coverage | None:
    """Return a map of first states, along their two principal components; None if they do not differ."""
    firsts = [np.asarray(values[bounds.starts, :MOST_DIMENSIONS], dtype=np.float64) for values in states.values()]
    if not firsts or len(bounds) < 3:
        return None
    joined = np.hstack(firsts)
    names = [
        f"{name.removeprefix('observation.')} {label}"
        for name in states
        for label in list(labels[name])[: min(MOST_DIMENSIONS, states[name].shape[1])]
    ]
    usable = np.isfinite(joined).all(1) & (np.abs(joined) < 1e100).all(1)
    if usable.sum() < 3:
        return None
    held = joined[usable]
    spread = held.std(0)
    # Constants up to rounding would become noise of unit size.
    moving = spread > 1e-9 * (1.0 + np.abs(held).max(0))
    if not moving.any():
        return None
    standard = (held[:, moving] - held[:, moving].mean(0)) / spread[moving]
    # Beyond ten deviations a single odd episode would draw the map.
    standard = np.clip(standard, -10, 10)
    kept = [name for name, moves in zip(names, moving, strict=True) if moves]
    if len(kept) <= 2:
        axes, shares = np.eye(len(kept)), None
        points = held[:, moving]
    else:
        _, sizes, axes = np.linalg.svd(standard - standard.mean(0), full_matrices=False)
        shares = sizes**2 / (sizes**2).sum()
        axes = axes[:2] * np.where(axes[:2, np.abs(axes[:2]).argmax(1)].diagonal() < 0, -1.0, 1.0)[:, None]
        points = standard @ axes.T
    titles = [_axis_title(place, axis, kept, shares) for place, axis in enumerate(axes[:2])]
    if len(titles) < 2:
        titles, points = [*titles, ""], np.column_stack([points[:, 0], np.zeros(len(points))])
    placed = np.full((len(joined), 2), np.nan)
    placed[usable] = points[:, :2]
    x, y = ([None if np.isnan(one) else float(f"{one:.5g}") for one in side] for side in placed.T.tolist())
    return Coverage(x, y, *titles)


def _axis_title(place: int, axis: Array, names: Sequence[str], shares: Array | None) -> str:
    if shares is None:
        return names[place]
    heaviest = [names[i] for i in np.argsort(-np.abs(axis), kind="stable")[:3]]
    return f"component {place + 1} ({shares[place]:.0%} of the variance; mostly {', '.join(heaviest)})"
