"""Runs side by side: which of them differ in their seed only, what else differs, and curves of groups. No torch."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from etude.runs.charts import Series, smoothed_if_rough
from etude.runs.page import spread
from etude.runs.report import Facts, read_facts

OBJECTIVE = (
    "policy.type", "policy.params.loss", "policy.params.kl_weight", "policy.params.prediction_type",
    "algorithm", "loss", "trainer",
)  # fmt: skip
"""Settings that say what a run minimises; those of an algorithm, a loss or a trainer count with all below them."""
IGNORED = ("run", "name", "description", "loggers")
"""Sections that say where a run is kept, and not what it is."""
GRID_POINTS = 200


@dataclass(frozen=True)
class Member:
    """One run of a group."""

    path: Path
    facts: Facts

    @property
    def seed(self) -> Any:
        """The seed of its training."""
        return self.facts.training.get("seed")

    @property
    def draw(self) -> str:
        """What its randomness is drawn from, every seed of its configuration: a run that shares it is no other draw."""
        seeds = list(_find_seeds(self.facts.config))
        return json.dumps(seeds, default=str) if seeds else str(self.path)


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed only, or one run."""

    name: str
    members: tuple[Member, ...]
    settings: Mapping[str, Any]
    """Every setting by its dotted name, without seeds."""
    colour: int = 0

    @property
    def seeds(self) -> int:
        """How many different seeds there are; copies of a run, and repetitions of it, are of one."""
        return len({member.draw for member in self.members})

    @property
    def objective(self) -> dict[str, Any]:
        """What the runs minimise, as far as the configuration tells."""
        return what_is_minimised(self.settings)

    def curve(self, name: str) -> Series | None:
        """Return a metric over the steps: of several runs the mean, with a band from the least to the greatest."""
        lines = [line for one in self.members if name in one.facts.series for line in [one.facts.series[name].finite()]]
        lines = [line for line in lines if line.values]
        if not lines:
            return None
        if len(lines) == 1:
            return Series(self.name, lines[0].steps, lines[0].values, colour=self.colour)
        return merge_curves(self.name, lines, self.colour)


def what_is_minimised(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings, by dotted names, that choose a loss: losses are alike where these are."""
    return {
        name: value
        for name, value in settings.items()
        if value is not None and any(name == part or name.startswith(f"{part}.") for part in OBJECTIVE)
    }


def read_groups(paths: Sequence[Path]) -> list[RunGroup]:
    """Read runs and put those together that differ in their seed only, in the order in which they were given."""
    found: dict[str, tuple[list[Member], dict[str, Any]]] = {}
    for path in paths:
        facts = read_facts(path)
        settings = dict(flatten(facts.config))
        key = json.dumps(settings, sort_keys=True, default=str) if settings else str(path.resolve())
        found.setdefault(key, ([], settings))[0].append(Member(path, facts))
    names = _names([members for members, _ in found.values()])
    return [
        RunGroup(name, tuple(members), settings, place)
        for place, (name, (members, settings)) in enumerate(zip(names, found.values(), strict=True))
    ]


def flatten(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration by dotted names, without seeds and what only says where a run is kept."""
    for key, value in config.items():
        if key == "seed" or (not path and key in IGNORED):
            continue
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from flatten({str(place): item for place, item in enumerate(value)}, name)
        else:
            yield name, value


def _find_seeds(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every seed of a configuration by its dotted name: what `flatten` leaves out."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        if key == "seed":
            yield f"{path}.{key}", part
        else:
            yield from _find_seeds(part, f"{path}.{key}")


def differing_settings(groups: Sequence[RunGroup]) -> list[str]:
    """Return the names of the settings in which groups differ, in the order of their files."""
    absent = object()
    names = dict.fromkeys(name for group in groups for name in group.settings)
    return [
        name
        for name in names
        if any(
            first.settings.get(name, absent) != second.settings.get(name, absent) for first, second in pairwise(groups)
        )
    ]


def merge_curves(name: str, lines: Sequence[Series], colour: int | None = None) -> Series:
    """Return the mean of several curves at steps of theirs, and a band from the least to the greatest."""
    # Noise within a run is not what runs differ in.
    lines = [Series(line.name, line.steps, smoothed_if_rough(line.values)) for line in lines]
    grid = spread(sorted({step for line in lines for step in line.steps}), GRID_POINTS)
    steps, means, low, high = list[float](), list[float](), list[float](), list[float]()
    for step in grid:
        values = [_at(line, step) for line in lines if line.steps[0] <= step <= line.steps[-1]]
        if values:
            steps.append(step)
            means.append(sum(values) / len(values))
            low.append(min(values))
            high.append(max(values))
    return Series(name, steps, means, low, high, colour)


def _at(line: Series, step: float) -> float:
    """Return the value of a curve at a step, between its points on the straight line from one to the next."""
    place = bisect_left(line.steps, step)
    if line.steps[place] == step:
        return line.values[place]
    before, after = line.steps[place - 1], line.steps[place]
    share = (step - before) / (after - before)
    return line.values[place - 1] * (1 - share) + line.values[place] * share


def _stem(names: Sequence[str]) -> str:
    shared = "".join(letters[0] for letters in takewhile(lambda found: len(set(found)) == 1, zip(*names, strict=False)))
    if shared in names:
        return shared
    return shared.rstrip("0123456789").rstrip("-_. ").removesuffix("seed").rstrip("-_. ")


def _names(groups: Sequence[Sequence[Member]]) -> list[str]:
    """Return a name for each group: that of its run, or how the names of its runs begin."""
    names: list[str] = []
    for members in groups:
        given = [member.facts.name for member in members]
        among = f"{given[0]} and {len(given) - 1} more" if len(given) > 1 else given[0]
        choices = (given[0] if len(given) == 1 else _stem(given) or among, among)
        where = str(members[0].path)
        names.append(next((name for name in choices if name not in names), among.replace(given[0], where, 1)))
    return names
