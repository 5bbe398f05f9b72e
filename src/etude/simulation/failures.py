"""Why episodes failed, as far as what is kept of them tells: rules in words, and groups of what went wrong alike.

Pure functions of traces, outcomes and demonstrations. The first thing that went wrong names the group: a policy that
has left its demonstrations will stop, disagree with itself, and run out of time as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.simulation.demonstrations import Demonstrations
from etude.simulation.traces import Array, EpisodeTrace

QUANTILE = 0.99
FEWEST_SUCCESSES = 5
"""Successes that a limit may rest on; with fewer, the demonstrations alone say what is far."""
IN_A_ROW = 3
"""Kept steps beyond a limit that are more than an accident."""
STILL, STILL_SHARE, STILL_STEPS = 0.03, 0.2, 10
"""Moving less than this, in deviations, for the last part of an episode is standing still."""
UNMOVED, MOVES = 0.05, 0.25
"""A number has not moved if it went a twentieth of its usual way; it always moves if it always goes a quarter of it."""
CLEAR_Z = 3.5
"""How clearly beginnings must differ to be told: one in 2000 by chance, for each of some ten numbers."""
LEFT = "left the demonstrations"
_AXIS = re.compile(r"(.+)_(?:x|y|z|qx|qy|qz|qw|angle)")


@dataclass(frozen=True)
class Episode:
    """An episode, how it went, and what is kept of it."""

    success: bool
    length: int
    """Steps that it took."""
    trace: EpisodeTrace


@dataclass(frozen=True)
class UsualLimits:
    """What is usual in an environment, from the successes of the evaluation or from the demonstrations."""

    distance: float | None = None
    distance_from: str = ""
    """What the limit of the distance rests on, in words."""
    disagreement: float | None = None
    uncertainty: float | None = None
    typical_steps: float | None = None


@dataclass(frozen=True)
class Finding:
    """What is known about one failure."""

    episode: int
    kind: str
    title: str
    onset: int | None
    """The step at which it began to go wrong, if that is known."""
    facts: tuple[str, ...]


@dataclass(frozen=True)
class FailureGroup:
    """Failures that went wrong in the same way."""

    env: str
    kind: str
    title: str
    note: str
    episodes: tuple[int, ...]

    def __str__(self) -> str:
        count = len(self.episodes)
        return f"{count} failure{'s' if count > 1 else ''}: {self.title}{f' ({self.note})' if self.note else ''}"


def find_limits(episodes: Sequence[Episode], demonstrations: Demonstrations | None) -> UsualLimits:
    """Return what is usual: 99 % of what successes show, or of how far demonstrations are from each other."""
    good = [one for one in episodes if one.success]
    rests = len(good) >= FEWEST_SUCCESSES
    distance, source = (_quantile([one.trace.distance for one in good]) if rests else None), "of the successes"
    if distance is None and demonstrations is not None:
        distance, source = _quantile([demonstrations.own_distances()]), "of the demonstrations from each other"
    lengths = [one.length for one in good] or ([] if demonstrations is None else demonstrations.lengths_E.tolist())
    return UsualLimits(
        distance,
        source if distance is not None else "",
        _quantile([one.trace.disagreement for one in good]) if rests else None,
        _quantile([one.trace.uncertainty for one in good]) if rests else None,
        float(np.median(lengths)) if lengths else None,
    )


def _quantile(parts: Sequence[Array]) -> float | None:
    values = np.concatenate([part[np.isfinite(part)] for part in parts]) if parts else np.zeros(0)
    return float(np.quantile(values, QUANTILE)) if len(values) else None


def explain(
    failures: Sequence[Episode], episodes: Sequence[Episode], limits: UsualLimits, demonstrations: Demonstrations | None
) -> list[Finding]:
    """Return what went wrong in each failure, beside all episodes of its environment."""
    unit = _unit(episodes, demonstrations)
    usual = _usual_travel([one for one in episodes if one.success], demonstrations)
    return [_explain_one(one, limits, unit, usual) for one in failures]


def _explain_one(one: Episode, limits: UsualLimits, unit_S: Array, usual_S: Array | None) -> Finding:
    trace, length = one.trace, one.length
    left = first_beyond(trace.steps, trace.distance, limits.distance)
    apart = first_beyond(trace.steps, trace.disagreement, limits.disagreement)
    unsure = first_beyond(trace.steps, trace.uncertainty, limits.uncertainty)
    still = None if trace.ended else still_from(trace.steps, trace.state / unit_S, length)
    unmoved = unmoved_parts(trace.names, trace.state, usual_S)
    left_kind, left_title = _tell_left(left, limits.typical_steps)
    onsets = {
        left_kind: (left, left_title),
        "apart": (apart, "plans disagree"),
        "unsure": (unsure, "unsure of what to do"),
        "still": (still, "stopped moving"),
    }
    told = [(step, kind, title) for kind, (step, title) in onsets.items() if step is not None]
    told.sort(key=lambda entry: entry[0])
    facts = [f"{LEFT if kind == left_kind else title} from step {step} on" for step, kind, title in told]
    facts = [f"{part} never moved" for part in unmoved[:3]] + facts
    onset = told[0][0] if told else None
    if trace.ended:
        kind, title = "ended", "ended by its own rules without success"
        onset = length
    elif unmoved:
        kind, title = f"unmoved {unmoved[0]}", f"{unmoved[0]} never moved"
    elif told:
        _, kind, title = told[0]
    else:
        kind, title = "time", "ran out of time" + (" near the demonstrations" if limits.distance is not None else "")
    facts.append(f"{'ended' if trace.ended else 'out of time'} at step {length}")
    return Finding(trace.episode, kind, title, onset, tuple(facts))


def _tell_left(step: int | None, typical_steps: float | None) -> tuple[str, str]:
    """Return kind and title of leaving the demonstrations at a step, beside the steps that a success takes."""
    if step is None or typical_steps is None:
        return "left", LEFT
    if step >= typical_steps:
        return "left after", f"not done in time, then {LEFT}"
    when = "early" if step < typical_steps / 2 else "late"
    return f"left {when}", f"{LEFT} {when}"


def group_findings(env: str, findings: Sequence[Finding], episodes: Sequence[Episode]) -> list[FailureGroup]:
    """Return groups of failures that went wrong alike, the largest first."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    by_number = {one.trace.episode: one for one in episodes}
    good = [_beginning(one) for one in episodes if one.success]
    groups = []
    for kind, members in kinds.items():
        steps = sorted(one.onset for one in members if one.onset is not None)
        notes = []
        if steps and kind != "time":
            middle = steps[(len(steps) - 1) // 2]
            began = "it ended" if kind == "ended" else "trouble begins"
            notes.append(f"{'' if len(steps) == 1 else 'in half of them '}{began} by step {middle}")
        if told := tell_starts([_beginning(by_number[one.episode]) for one in members], good):
            notes.append(told)
        numbers = tuple(sorted(one.episode for one in members))
        groups.append(FailureGroup(env, kind, members[0].title, "; ".join(notes), numbers))
    return sorted(groups, key=lambda group: (-len(group.episodes), group.kind))


# ---- rules -----------------------------------------------------------------------------------------------------------


def first_beyond(steps: Array, values: Array, limit: float | None) -> int | None:
    """Return the first step from which some kept steps in a row lie beyond a limit."""
    if limit is None or not len(values):
        return None
    with np.errstate(invalid="ignore"):
        beyond = values > limit
    row = min(IN_A_ROW, len(beyond))
    for place in range(len(beyond) - row + 1):
        if beyond[place : place + row].all():
            return int(steps[place])
    return None


def still_from(steps: Array, states_PS: Array, length: int) -> int | None:
    """Return the step after which the state hardly changes to the end, if that is long before it."""
    if len(steps) < 2 or not states_PS.shape[1]:
        return None
    away = np.sqrt(np.square(states_PS - states_PS[-1]).mean(1))
    moving = np.flatnonzero(~(away < STILL))
    first = int(moving[-1]) + 1 if len(moving) else 0
    begun = int(steps[min(first, len(steps) - 1)])
    return begun if length - begun >= max(STILL_STEPS, STILL_SHARE * length) else None


def unmoved_parts(names: Sequence[str], states_PS: Array, usual_S: Array | None) -> list[str]:
    """Return what always moves but did not here; numbers that are named after one thing count together."""
    if usual_S is None:
        return []
    travel = np.ptp(states_PS, axis=0)
    parts: dict[str, bool] = {}
    for name, way, usual in zip(names, travel, usual_S, strict=True):
        if usual > 0 and not name.startswith("previous_"):
            part = match[1] if (match := _AXIS.fullmatch(name)) else name
            parts[part] = parts.get(part, True) and bool(way < UNMOVED * usual)
    return [part for part, stayed in parts.items() if stayed]


def _usual_travel(good: Sequence[Episode], demonstrations: Demonstrations | None) -> Array | None:
    """Return how far each number usually goes in an episode that succeeds; 0 where some do without."""
    if demonstrations is not None:
        numbers = np.unique(demonstrations.episodes_N)[:200]
        ways = [np.ptp(demonstrations.states_NS[demonstrations.episodes_N == one], axis=0) for one in numbers]
    elif len(good) >= FEWEST_SUCCESSES:
        ways = [np.ptp(one.trace.state, axis=0) for one in good]
    else:
        return None
    usual: Array = np.median(ways, axis=0)
    return np.where(np.min(ways, axis=0) > MOVES * usual, usual, 0.0)


def _unit(episodes: Sequence[Episode], demonstrations: Demonstrations | None) -> Array:
    if demonstrations is not None:
        return demonstrations.centre_and_unit[1]
    deviation = np.concatenate([one.trace.state for one in episodes]).std(0)
    return np.where(deviation > 1e-9, deviation, np.inf)


# ---- where they begin ------------------------------------------------------------------------------------------------


def _beginning(one: Episode) -> dict[str, float]:
    distance = one.trace.distance
    return {**one.trace.scene, **({"distance to the demonstrations": float(distance[0])} if len(distance) else {})}


def tell_starts(bad: Sequence[dict[str, float]], good: Sequence[dict[str, float]]) -> str:
    """Return how the beginnings of failures differ most from those of successes, where that is clear."""
    best, told = CLEAR_Z, ""
    for name in (good[0] if good else {}) if len(bad) >= 5 and len(good) >= 5 else ():
        here, there = np.array([one[name] for one in bad]), np.array([one[name] for one in good])
        z = rank_z(here, there)
        if abs(z) > best:
            way = "larger" if z > 0 else "smaller"
            best = abs(z)
            told = f"they begin with a {way} {name}: {np.median(here):.3g}, successes {np.median(there):.3g}"
    return told


def rank_z(here: Array, there: Array) -> float:
    """Return Mann and Whitney's statistic as a normal deviate; 0 where nothing differs."""
    both = np.concatenate([here, there])
    _, places, counts = np.unique(both, return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return 0.0
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    n, m, total = len(here), len(there), len(both)
    ties = float((counts.astype(float) ** 3 - counts).sum()) / (total * (total - 1))
    deviation = math.sqrt(n * m / 12 * (total + 1 - ties))
    return float((ranks[:n].sum() - n * (total + 1) / 2) / deviation) if deviation > 0 else 0.0
