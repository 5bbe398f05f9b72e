"""Episodes that look odd: lengths, jumps, values that stand still, repeat, leave their range or are none at all.

Every rule compares an episode with the others of its dataset, by medians and quantiles that a few odd ones do not move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.runs.page import format_number

Array = NDArray[Any]

KINDS: Final = {
    "values": "values that are not finite",
    "time": "timestamps that do not fit",
    "video": "missing videos",
    "copy": "copies of another episode",
    "repeat": "repeated frames",
    "length": "unusual length",
    "jump": "jumps",
    "range": "values out of range",
    "constant": "dimensions that stand still",
}
"""What can be odd, by what it is called in addresses and tests."""

ENOUGH_EPISODES: Final = 8
"""Below this, no episode is compared with what is usual among the others."""
ENOUGH_FRAMES: Final = 5
LENGTH_SCORE: Final = 6.0
JUMP_FACTOR, JUMP_SHARE = 6.0, 0.15
"""A jump is so many times the largest step of a usual episode, and this share of the range of its dimension."""
RANGE_FACTOR: Final = 3.0
"""How many times the width of the middle 98 % a value may lie beyond them."""
ABSURD: Final = 1e6
LARGEST: Final = 1e300
"""Differences of larger values overflow; they are taken for this."""
CONSTANT_SHARE: Final = 0.1
REPEAT_S, REPEAT_FACTOR = 0.5, 3.0
TIME_SHARE: Final = 0.1
_SAMPLED_ROWS: Final = 100_000
"""For quantiles: the error of a 1 % quantile is then 0.03 %."""
_FEW_VALUES: Final = 8
_MAD_TO_STD: Final = 1.4826


class Mark(NamedTuple):
    """One thing that is odd about one episode."""

    kind: str
    episode: int
    text: str
    weight: float
    """How far off it is, in its rule's own limits: 1 is just beyond."""
    frame: int | None = None
    feature: str = ""
    label: str = ""


@dataclass(frozen=True)
class Bounds:
    """Which rows belong to which episode, and which episodes to which task."""

    lengths: Array
    tasks: Array

    @cached_property
    def starts(self) -> Array:
        """First row of each episode."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def is_first(self) -> Array:
        """Whether a row is the first of its episode."""
        mask = np.zeros(int(self.lengths.sum()), dtype=bool)
        mask[self.starts] = True
        return mask

    @cached_property
    def sample(self) -> Array:
        """Rows that quantiles are taken from: all, or a fixed random choice."""
        rows = int(self.lengths.sum())
        if rows <= _SAMPLED_ROWS:
            return np.arange(rows)
        return np.sort(np.random.default_rng(0).choice(rows, _SAMPLED_ROWS, replace=False))

    @cached_property
    def peers(self) -> list[Array]:
        """Episodes of one task, for each task that has enough of them to say what is usual."""
        order = np.argsort(self.tasks, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(self.tasks[order])) + 1)
        return [group for group in groups if len(group) >= ENOUGH_EPISODES]

    def __len__(self) -> int:
        return len(self.lengths)

    def usual(self, numbers: Array) -> Array:
        """Return for each episode the median of its peers, or of all where it has too few."""
        found = np.full(len(self), float(np.median(numbers)) if len(self) >= ENOUGH_EPISODES else 0.0)
        for group in self.peers:
            found[group] = np.median(numbers[group])
        return found

    def slice(self, episode: int) -> slice:
        """Return the rows of one episode."""
        return slice(int(self.starts[episode]), int(self.starts[episode] + self.lengths[episode]))


@dataclass(frozen=True)
class UsualRange:
    """What is usual for one dimension over the whole dataset."""

    low: float
    """One value in a hundred is below."""
    middle: float
    high: float
    is_discrete: bool

    @property
    def width(self) -> float:
        """How far the middle 98 % of the values reach."""
        return self.high - self.low


def scale_of(sample: Array) -> UsualRange | None:
    """Return what is usual among finite values; None if there are none."""
    if not len(sample):
        return None
    low, middle, high = np.quantile(sample, (0.01, 0.5, 0.99))
    return UsualRange(float(low), float(middle), float(high), len(np.unique(sample[:20_000])) <= _FEW_VALUES)


def _name(feature: str, label: str) -> str:
    return f"{feature} {label}" if label else feature


def find_broken(values: Array, bounds: Bounds, feature: str, label: str) -> Iterator[Mark]:
    """Yield a mark for each episode in which a value is NaN or infinite."""
    broken = ~np.isfinite(values)
    if not broken.any():
        return
    counts = np.add.reduceat(broken, bounds.starts, dtype=np.int64)
    for episode in np.flatnonzero(counts).tolist():
        frame, count = int(broken[bounds.slice(episode)].argmax()), int(counts[episode])
        frames = f"{count} frames, first at {frame}" if count > 1 else f"frame {frame}"
        yield Mark(
            "values", episode, f"{_name(feature, label)} is not finite in {frames}", 1e6 + count, frame, feature, label
        )


def find_jumps(values: Array, bounds: Bounds, scale: UsualRange, feature: str, label: str) -> Iterator[Mark]:
    """Yield a mark for each episode with a step far larger than the largest of a usual one."""
    if scale.is_discrete or len(values) < 4 * ENOUGH_FRAMES:
        return
    steps = np.zeros(len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        np.abs(np.diff(values), out=steps[1:])
    steps[bounds.is_first | ~np.isfinite(steps)] = 0.0
    largest = np.maximum.reduceat(steps, bounds.starts)
    least = _usual_step(steps[bounds.sample])
    usual = np.maximum(bounds.usual(largest), least)
    limits = np.maximum(JUMP_FACTOR * usual, JUMP_SHARE * scale.width)
    for episode in np.flatnonzero((largest > limits) & (usual > 0)).tolist():
        frame, size = int(steps[bounds.slice(episode)].argmax()), float(largest[episode])
        times = format_number(round(min(size / float(usual[episode]), LARGEST)))
        moved = f"jumps by {format_number(size)} at frame {frame}, {times} times the usual largest step"
        text = f"{_name(feature, label)} {moved}"
        yield Mark("jump", episode, text, min(size / float(limits[episode]), ABSURD), frame, feature, label)


def _usual_step(steps: Array) -> float:
    moving = steps[steps > 0]
    return float(np.quantile(moving, 0.95)) if len(moving) >= ENOUGH_FRAMES else 0.0


def find_beyond(values: Array, bounds: Bounds, scale: UsualRange, feature: str, label: str) -> Iterator[Mark]:
    """Yield a mark for each episode with a value far beyond the middle 98 % of all values."""
    if len(values) < 4 * ENOUGH_FRAMES:
        return
    absurd = ABSURD * (1.0 + max(abs(scale.low), abs(scale.high)))
    reach = RANGE_FACTOR * scale.width if scale.width > 0 and not scale.is_discrete else absurd
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.maximum(scale.low - values, values - scale.high)
    off[~np.isfinite(off)] = -1.0
    furthest = np.maximum.reduceat(off, bounds.starts)
    for episode in np.flatnonzero(furthest > reach).tolist():
        part = bounds.slice(episode)
        frame = int(off[part].argmax())
        text = (
            f"{_name(feature, label)} is {format_number(float(values[part][frame]))} at frame {frame}; 98 % of all lie "
            f"between {format_number(scale.low)} and {format_number(scale.high)}"
        )
        yield Mark("range", episode, text, min(float(furthest[episode]) / reach, ABSURD), frame, feature, label)


def find_constant(values: Array, bounds: Bounds, feature: str, label: str) -> Iterator[Mark]:
    """Yield a mark for each episode in which a dimension stands still that moves in nearly all others."""
    still = np.maximum.reduceat(values, bounds.starts) == np.minimum.reduceat(values, bounds.starts)
    still &= bounds.lengths >= ENOUGH_FRAMES
    for group in bounds.peers:
        share = float(still[group].mean())
        if not 0 < share <= CONSTANT_SHARE:
            continue
        for episode in group[still[group]].tolist():
            value = format_number(float(values[bounds.starts[episode]]))
            text = (
                f"{_name(feature, label)} stays {value}, though it moves in {1 - share:.0%} of the episodes of its task"
            )
            yield Mark("constant", episode, text, 1.0 + CONSTANT_SHARE / share, None, feature, label)


def find_lengths(bounds: Bounds, fps: float) -> Iterator[Mark]:
    """Yield a mark for each episode far shorter or longer than others of its task."""
    logs = np.log(bounds.lengths)
    middle = bounds.usual(logs)
    # At least a tenth: where nearly all have one length, one frame more is not odd.
    spread = np.maximum(_MAD_TO_STD * bounds.usual(np.abs(logs - middle)), 0.1)
    for group in bounds.peers:
        scores = np.abs(logs[group] - middle[group]) / spread[group]
        for episode, score in zip(group.tolist(), scores.tolist(), strict=True):
            if score > LENGTH_SCORE:
                length, usual = int(bounds.lengths[episode]), round(float(np.exp(middle[episode])))
                text = f"{length:,} frames ({length / fps:.1f} s), where {usual:,} are usual for its task"
                yield Mark("length", episode, text, score / LENGTH_SCORE)


def find_repeats(states: Sequence[Array], actions: Sequence[Array], bounds: Bounds, fps: float) -> Iterator[Mark]:
    """Yield a mark for each episode whose states (actions where there are none) stay the same for long."""
    watched = states or actions
    if not watched:
        return
    runs = _run_lengths(_same_as_before(watched, bounds), bounds)
    longest = np.maximum.reduceat(runs, bounds.starts)
    limits = np.maximum(REPEAT_FACTOR * bounds.usual(longest), max(ENOUGH_FRAMES, REPEAT_S * fps))
    flagged = np.flatnonzero(longest > limits).tolist()
    acting = _same_as_before(actions, bounds) if flagged and states and actions else None
    for episode in flagged:
        part = bounds.slice(episode)
        last, count = int(runs[part].argmax()), int(longest[episode])
        first = last - count + 1
        moved = acting is not None and not acting[part][first + 1 : last + 1].all()
        what = "states stand still while actions change" if moved else "the same values repeat"
        text = f"{what} for {count} frames ({count / fps:.1f} s) from frame {first}"
        yield Mark("repeat", episode, text, count / float(limits[episode]), first)


def _same_as_before(columns: Sequence[Array], bounds: Bounds) -> Array:
    same = ~bounds.is_first
    for column in columns:
        equal = column[1:] == column[:-1]
        same[1:] &= equal.all(1) if equal.ndim > 1 else equal
    return same


def _run_lengths(same: Array, bounds: Bounds) -> Array:
    """Return for each row how many rows up to it are alike."""
    rows = np.arange(len(same))
    return rows - np.maximum.accumulate(np.where(same, 0, rows)) + 1


def share_repeated(columns: Sequence[Array], bounds: Bounds) -> float:
    """Return which share of all frames is the same as the one before."""
    return float(_same_as_before(columns, bounds).mean()) if columns else 0.0


def find_copies(columns: Mapping[str, Array], bounds: Bounds) -> Iterator[Mark]:
    """Yield a mark for each episode whose numbers are those of an earlier one."""
    first: dict[bytes, int] = {}
    for episode in range(len(bounds) if columns else 0):
        if bounds.lengths[episode] < ENOUGH_FRAMES:
            continue
        digest = hashlib.blake2b(digest_size=16)
        for values in columns.values():
            digest.update(np.ascontiguousarray(values[bounds.slice(episode)]).data)
        before = first.setdefault(digest.digest(), episode)
        if before != episode:
            yield Mark("copy", episode, f"every state and action is that of episode {before}", 1e3)


def find_misfit_time(stamps: Array, frame_index: Array, bounds: Bounds, fps: float) -> Iterator[Mark]:
    """Yield a mark for each episode whose frames are not 1 / fps apart, or not numbered one by one."""
    frames = np.arange(len(stamps)) - np.repeat(bounds.starts, bounds.lengths)
    # Stored in float32: at 1000 s neighbours are 6e-5 s apart.
    off = ~(np.abs(stamps.astype(np.float64) - frames / fps) <= TIME_SHARE / fps + np.abs(stamps) * 2.0**-22)
    misnumbered = frame_index != frames
    for episode in np.flatnonzero(np.logical_or.reduceat(misnumbered, bounds.starts)).tolist():
        frame = int(misnumbered[bounds.slice(episode)].argmax())
        yield Mark(
            "time", episode, f"frame {frame} is numbered {frame_index[bounds.slice(episode)][frame]}", 1e4, frame
        )
    for episode in np.flatnonzero(np.logical_or.reduceat(off, bounds.starts)).tolist():
        part = bounds.slice(episode)
        frame = int(off[part].argmax())
        found, count = float(stamps[part][frame]), int(off[part].sum())
        more = f", and {count - 1} more frames are off" if count > 1 else ""
        text = f"frame {frame} is at {found:.3f} s, expected {frame / fps:.3f} s at {fps:g} a second{more}"
        yield Mark("time", episode, text, 1e3 + count, frame)
