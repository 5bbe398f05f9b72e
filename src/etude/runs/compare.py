"""`etude compare`: runs laid over each other, as a table and as one page that says which differences are real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.errors import ConfigError
from etude.reading.plain import show_value
from etude.runs.charts import COLOURS, MOST_BUCKETS, plan_chart
from etude.runs.durable import write_output
from etude.runs.evaluations import Evaluation
from etude.runs.groups import Member, RunGroup, differing_settings, read_groups
from etude.runs.leading import is_loss, is_quiet, lead, prefers_large
from etude.runs.page import format_interval, format_number, format_percent, render
from etude.runs.progress import format_duration
from etude.runs.report import duration_s
from etude.runs.statistics import (
    Interval,
    Scores,
    aggregate,
    aggregate_difference,
    improvement_probability,
    interval_difference,
    student_difference,
)

FEWEST_SEEDS = 3
"""Seeds on both sides from which a difference is judged."""
# Of two groups that are alike the bootstrap's interval leaves out 0 in 21 % of the cases with three runs each, in 8 %
# with four and in 5 % from eight on.
FEW_SEEDS = 5
"""Seeds below which Student's interval has to leave out 0 as well."""
MOST_CHARTS, MOST_SETTINGS, LONGEST_VALUE = 12, 20, 60
POINTS_OF_A_CHART = 6000
"""Points that all curves of a chart share, so that a page of a hundred runs opens at once."""
OTHER_LOSSES = (
    "These runs minimise different losses, which cannot be ranked against each other; success or reward in one "
    "environment can (`etude evaluate`)."
)
LAST_SHARE = 0.1
"""What counts of a curve of training is the mean of its last tenth: single points are noise."""


@dataclass(frozen=True)
class Yardstick:
    """What runs are compared by."""

    title: str
    how: str
    """How a run's score came about, in a sentence."""
    large: bool | None
    """Whether more is better; None if that is not known."""
    is_share: bool = False
    note: str = ""
    """What else to know of it."""

    def write(self, value: float) -> str:
        """Write a score for people."""
        return format_percent(value) if self.is_share else format_number(float(f"{value:.4g}"))

    def write_signed(self, value: float) -> str:
        """Write a difference for people."""
        text = f"{value * 100:.1f} points" if self.is_share else format_number(float(f"{value:.3g}"))
        return text if value < 0 else f"+{text}"


@dataclass(frozen=True)
class Standing:
    """Where a group stands: its score with an interval, and how it differs from the first group."""

    group: RunGroup
    scores: Mapping[str, tuple[float, ...]]
    """The scores of each run that has any, by its path: one for each task."""
    score: float | None
    interval: Interval | None
    difference: float | None = None
    difference_interval: Interval | None = None
    verdict: str = ""
    """What the difference is worth, in words; empty for the first group."""
    is_real: bool = False
    chance: float | None = None
    """How likely a run of this group beats one of the first."""

    @property
    def scores_RT(self) -> list[tuple[float, ...]]:
        """A row for each seed that has a score, the mean of its runs where there are several, and a column a task."""
        rows: dict[str, list[tuple[float, ...]]] = {}
        for member in self.group.members:
            if (row := self.scores.get(str(member.path))) is not None:
                rows.setdefault(member.draw, []).append(row)
        return [tuple(sum(values) / len(values) for values in zip(*found, strict=True)) for found in rows.values()]


@dataclass(frozen=True)
class RunComparison:
    """Groups of runs with what they are compared by."""

    yardstick: Yardstick
    standings: tuple[Standing, ...]
    settings: list[str] = field(default_factory=list)
    """Names of the settings in which groups differ."""

    @property
    def groups(self) -> list[RunGroup]:
        """The groups, in order."""
        return [standing.group for standing in self.standings]

    def difference_text(self, standing: Standing) -> str:
        """Write how a group differs from the first, with the interval."""
        if standing.difference is None:
            return ""
        text = self.yardstick.write_signed(standing.difference)
        if standing.difference_interval is None:
            return text
        return f"{text} ({format_interval(standing.difference_interval, self.yardstick.write_signed)})"


def compare_runs(paths: Sequence[Path], metric: str | None = None) -> RunComparison:
    """Read runs, group those that differ in their seed only, and compare each group with the first.

    Args:
        paths: Run directories; the first one's group is what others are compared with.
        metric: What to compare by; None takes what matters most of what all runs have.
    """
    groups = read_groups(paths)
    members = [member for group in groups for member in group.members]
    alike = all(group.objective == groups[0].objective for group in groups)
    yardstick, score, interval = _choose_yardstick(members, metric, alike)
    standings: list[Standing] = []
    for group in groups:
        found = {str(member.path): row for member in group.members if (row := score(member)) is not None}
        standing = Standing(group, found, None, None)
        rows = standing.scores_RT
        if len(rows) > 1:
            standing = Standing(group, found, *aggregate(rows))
        elif rows:
            scored = next(member for member in group.members if str(member.path) in found)
            standing = Standing(group, found, sum(rows[0]) / len(rows[0]), interval(scored))
        standings.append(_against(standing, standings[0], yardstick) if standings else standing)
    return RunComparison(yardstick, tuple(standings), differing_settings(groups))


Score = Callable[[Member], tuple[float, ...] | None]
Spread = Callable[[Member], Interval | None]


def _choose_yardstick(members: Sequence[Member], metric: str | None, alike: bool) -> tuple[Yardstick, Score, Spread]:
    """Return what to compare by, and how a run's scores and its own interval, which only episodes tell, are found.

    Args:
        members: All runs.
        metric: What was asked for.
        alike: Whether all of them minimise the same loss.
    """
    found = [_evaluations_of(member) for member in members]
    shared = [which for which in found[0] if all(which in one for one in found)]
    if metric is None and shared:
        title, split, *tasks = which = shared[0]
        how = f"Found by `etude evaluate` on the {split} split, a score for each of {len(tasks)} environments."
        if len(tasks) == 1:
            how = f"Found by `etude evaluate` in {tasks[0]} on the {split} split."
        stick = Yardstick(title, how, True, title == "success")
        ours = {str(member.path): one[which] for member, one in zip(members, found, strict=True)}
        return (
            stick,
            lambda member: tuple(one.value for one in ours[str(member.path)].tasks),
            lambda member: ours[str(member.path)].total.interval,
        )
    name = metric or _common_metric(members, alike)
    known = sorted({known for member in members for known in member.facts.series})
    if name not in known:
        raise ConfigError(f"no run has the metric {name!r}; there are {', '.join(known) or 'none'}")
    training = members[0].facts.training
    how = "The last value of each run." if name.startswith("eval/") else "The mean over the last tenth of each run."
    note = OTHER_LOSSES if is_loss(name) and not alike else ""
    stick = Yardstick(name, how, prefers_large(name, training), note=note)
    return stick, lambda member: _last_value(member, name), lambda member: None


def _evaluations_of(member: Member) -> dict[tuple[str, ...], Evaluation]:
    """Return a run's evaluations by what they measured, and where; the first of each, in the order of the run."""
    found: dict[tuple[str, ...], Evaluation] = {}
    for one in member.facts.evaluations:
        titles = {task.title for task in one.tasks}
        if len(titles) == 1:
            found.setdefault((titles.pop(), one.split, *(task.name for task in one.tasks)), one)
    return found


def _common_metric(members: Sequence[Member], alike: bool) -> str:
    counts = Counter(name for member in members for name in member.facts.series if not is_quiet(name))
    if not counts:
        raise ConfigError("none of the runs has logged a metric yet")
    most = max(counts.values())
    chosen = {member.facts.training.get("best_metric") for member in members}
    shared = sorted(name for name, count in counts.items() if count == most)
    if not alike:  # a loss only if nothing else tells better from worse
        shared = [name for name in shared if not is_loss(name) and prefers_large(name) is not None] or shared
    return lead(shared, chosen.pop() if len(chosen) == 1 else None)[0]


def _last_value(member: Member, name: str) -> tuple[float, ...] | None:
    line = member.facts.series.get(name)
    values = [] if line is None else line.finite().values
    if not values:
        return None
    count = 1 if name.startswith("eval/") else max(1, round(len(values) * LAST_SHARE))
    return (sum(values[-count:]) / count,)


def _against(standing: Standing, first: Standing, yardstick: Yardstick) -> Standing:
    """Return a standing with its difference from the first group, and what that is worth."""
    ours, theirs = standing.scores_RT, first.scores_RT
    if standing.score is None or first.score is None:
        return _judged(standing, None, None, "no score to compare", False)
    if is_loss(yardstick.title) and standing.group.objective != first.group.objective:
        return _judged(standing, None, None, _other_loss(standing.group, first.group), False)
    fewest = min(len(ours), len(theirs))
    if len(ours) == len(theirs) == 1:
        apart = standing.score - first.score
        if standing.interval is None or first.interval is None:
            return _judged(standing, apart, None, "one run each: nothing tells a difference from chance", False)
        apart, ends = interval_difference(standing.score, standing.interval, first.score, first.interval)
        chance, note = None, "; of these two runs, other seeds may differ"
    elif fewest < FEWEST_SEEDS:
        apart = standing.score - first.score
        text = f"too few seeds to tell ({len(ours)} and {len(theirs)}, of {FEWEST_SEEDS} each)"
        return _judged(standing, apart, None, text, False)
    else:
        apart, ends = aggregate_difference(ours, theirs)
        chance, note = _chance_to_beat(ours, theirs, yardstick.large), ""
    if _includes_zero(ends):
        return _judged(standing, apart, ends, f"not a difference: the interval includes 0{note}", False, chance)
    if FEWEST_SEEDS <= fewest < FEW_SEEDS and _includes_zero(student_difference(ours, theirs)):
        text = f"not a difference yet: Student's interval, which suits {fewest} seeds better, includes 0"
        return _judged(standing, apart, ends, text, False, chance)
    if yardstick.large is None:
        which = "higher" if apart > 0 else "lower"
    else:
        which = "better" if (apart > 0) == yardstick.large else "worse"
    return _judged(standing, apart, ends, which + note, True, chance)


def _includes_zero(ends: Interval) -> bool:
    return ends[0] <= 0 <= ends[1]


def _other_loss(group: RunGroup, first: RunGroup) -> str:
    """Say in which setting the losses of two groups differ."""
    ours, theirs = group.objective, first.objective
    name = next(name for name in (*theirs, *ours) if ours.get(name) != theirs.get(name))
    values = [_setting(one, name) if name in one else "nothing" for one in (ours, theirs)]
    return f"not ranked: another loss ({name} is {values[0]}, not {values[1]})"


def _chance_to_beat(ours: Scores, theirs: Scores, large: bool | None) -> float | None:
    if large is None:
        return None
    return improvement_probability(ours, theirs) if large else improvement_probability(theirs, ours)


def _judged(
    standing: Standing, apart: float | None, ends: Interval | None, verdict: str, is_real: bool,
    chance: float | None = None,
) -> Standing:  # fmt: skip
    return replace(
        standing, difference=apart, difference_interval=ends, verdict=verdict, is_real=is_real, chance=chance
    )


def write_comparison(comparison: RunComparison, output: Path) -> Path:
    """Write a comparison as one self-contained page, and return its path."""
    return write_output(output, render_comparison(comparison))


def render_comparison(comparison: RunComparison, **page: Any) -> str:
    """Return the page as text; `page` is for what serves it."""
    groups = comparison.groups
    shown = comparison.settings[:MOST_SETTINGS]
    return render(
        "runs/compare.html",
        comparison=comparison,
        facts=[f"{sum(len(group.members) for group in groups)} runs in {_counted(len(groups), 'group')}"],
        colours=COLOURS,
        charts=_plan_charts(comparison),
        settings=[(group, [_setting(group.settings, name) for name in shown]) for group in groups],
        setting_names=shown,
        costs=[(group, describe_cost(group)) for group in groups],
        members=[
            (standing.group, member, _score_text(comparison, standing, member))
            for standing in comparison.standings
            for member in standing.group.members
        ],
        **page,
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _plan_charts(comparison: RunComparison) -> list[dict[str, Any]]:
    groups = comparison.groups
    names = {name for group in groups for member in group.members for name in member.facts.series}
    first = comparison.yardstick.title
    ordered = [name for name in lead(sorted(names), first) if not is_quiet(name)]
    buckets = max(12, min(MOST_BUCKETS, POINTS_OF_A_CHART // (2 * len(groups))))
    charts = []
    for name in ordered[:MOST_CHARTS]:
        curves = [curve for group in groups if (curve := group.curve(name)) is not None]
        if curves:
            charts.append(plan_chart(name, curves, buckets=buckets))
    return charts


def _setting(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "-"
    text = show_value(settings[name])
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _score_text(comparison: RunComparison, standing: Standing, member: Member) -> str:
    row = standing.scores.get(str(member.path))
    return "-" if row is None else comparison.yardstick.write(sum(row) / len(row))


def describe_cost(group: RunGroup) -> dict[str, str]:
    """Return what a run of a group takes, on average."""
    facts = [member.facts for member in group.members]
    steps = [one.last_step for one in facts]
    seconds = [found for one in facts if (found := duration_s(one)) is not None]
    parameters = [found for one in facts if isinstance(found := one.status.get("parameters"), int)]
    rate = sum(steps) / sum(seconds) if seconds and sum(seconds) > 0 else None
    return {
        "steps": format_number(round(sum(steps) / len(steps))),
        "duration": format_duration(sum(seconds) / len(seconds)) if seconds else "-",
        "steps/s": "-" if rate is None else format_number(float(f"{rate:.3g}")),
        "parameters": format_number(max(parameters)) if parameters else "-",
    }
