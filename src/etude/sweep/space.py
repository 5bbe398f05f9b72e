"""What a sweep searches: `training.lr=log(1e-5,1e-2)` and its like, read into ranges and choices. Pure, no Optuna."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean
from etude.secrets import redact

_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\((.*)\)", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"
MOST_GRID_POINTS = 100_000
LARGEST_WHOLE = 2**53
"""Up to here every whole number is one that the search, which counts in floating point, can tell from the next."""
INSIDE = 0.381966
"""Where a number between two ends is tried: no simple share of them."""


@dataclass(frozen=True)
class SearchRange:
    """Numbers between two ends, both of which belong to it."""

    key: str
    low: float
    high: float
    is_log: bool = False
    step: float | None = None
    """The distance of its numbers; None is any number between the ends."""

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are whole."""
        return isinstance(self.low, int)

    def write(self, value: Any) -> str:
        """Write a value as an override has it, exactly."""
        return str(round(value)) if self.is_whole else repr(float(value))

    def samples(self) -> tuple[str, ...]:
        """Return values of which at least one is refused if the range does not fit its key."""
        ends = self.write(self.low), self.write(self.high)
        # Whole ends may fit a key that takes whole numbers alone.
        return ends if self.is_whole else (*ends, self.write(self.low + (self.high - self.low) * INSIDE))

    def points(self) -> list[Any]:
        """Return its numbers one by one, as a grid takes them."""
        if self.step is None:
            raise ConfigError(
                f"{self.key}: a grid has no end between {self.low:g} and {self.high:g}; "
                f"write choices (1e-4,1e-3) or range({self.low:g},{self.high:g},STEP)"
            )
        if (size := self.size) > MOST_GRID_POINTS:
            raise ConfigError(f"{self.key}: {size:,} numbers are too many for a grid; take --sampler tpe or random")
        return [self.point(place) for place in range(size)]

    @property
    def size(self) -> int:
        """How many numbers a step apart there are."""
        assert self.step is not None
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def point(self, place: int) -> float:
        """Return one of its numbers that are a step apart."""
        assert self.step is not None
        point = self.low + place * self.step
        return point if self.is_whole else float(f"{point:.12g}")

    def __str__(self) -> str:
        ends = f"{self.low:g} to {self.high:g}"
        steps = (
            f" in steps of {self.step:g}" if self.step is not None and (self.step, self.is_whole) != (1, True) else ""
        )
        return f"{'whole numbers ' if self.is_whole else ''}{ends}{', logarithmic' if self.is_log else ''}{steps}"


@dataclass(frozen=True)
class SearchChoice:
    """Some values, as they were written."""

    key: str
    options: tuple[str, ...]

    def write(self, value: Any) -> str:
        """Write a value as an override has it."""
        return str(value)

    def samples(self) -> tuple[str, ...]:
        """Return every value: each may be refused."""
        return self.options

    def points(self) -> list[Any]:
        """Return the values, as a grid takes them."""
        return list(self.options)

    def __str__(self) -> str:
        return ", ".join(self.options)


SearchParameter = SearchRange | SearchChoice


@dataclass(frozen=True)
class SearchSpace:
    """What is searched, and what is fixed, in the order in which it was written."""

    entries: tuple[str | SearchParameter, ...]
    """Overrides that hold for every trial, and what is searched: what comes later may be a part of what came before."""
    written: tuple[str, ...]
    """What is searched, as it was written."""

    @property
    def parameters(self) -> tuple[SearchParameter, ...]:
        """What is searched."""
        return tuple(entry for entry in self.entries if not isinstance(entry, str))

    @property
    def fixed(self) -> tuple[str, ...]:
        """The overrides that hold for every trial."""
        return tuple(entry for entry in self.entries if isinstance(entry, str))

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial, given a value for every key that is searched."""
        return self._fill({one.key: one.write(values[one.key]) for one in self.parameters})

    def _fill(self, texts: Mapping[str, str]) -> list[str]:
        return [entry if isinstance(entry, str) else f"{entry.key}={texts[entry.key]}" for entry in self.entries]

    def samples(self) -> Iterator[list[str]]:
        """Yield overrides in which every end and every choice occurs: what is wrong shows before the first trial."""
        first = {one.key: one.samples()[0] for one in self.parameters}
        yield self._fill(first)
        for one in self.parameters:
            for value in one.samples()[1:]:
                yield self._fill(first | {one.key: value})

    def grid(self) -> list[dict[str, Any]]:
        """Return every combination, the last parameter running fastest."""
        points = [one.points() for one in self.parameters]
        if (size := math.prod(map(len, points))) > MOST_GRID_POINTS:
            raise ConfigError(f"a grid of {size:,} combinations is too large; search it with --sampler tpe or random")
        keys = [one.key for one in self.parameters]
        return [dict(zip(keys, values, strict=True)) for values in itertools.product(*points)]


def parse_space(texts: Sequence[str]) -> SearchSpace:
    """Read `key=what` texts; raise `ConfigError` for what is no range, no choice and no value."""
    entries: list[str | SearchParameter] = []
    written: list[str] = []
    keys: set[str] = set()
    for text in texts:
        key, equals, what = text.partition("=")
        key, what = key.strip(), what.strip()
        if not equals or not key:
            raise ConfigError(f"{redact(text)!r}: write key=what, such as 'training.lr=log(1e-5,1e-2)'")
        if key in keys:
            raise ConfigError(f"{key} is given twice; write all of its values in one: {key}=A,B")
        keys.add(key)
        found = _parse(key, what)
        entries.append(text if found is None else found)
        if found is not None:
            written.append(f"{key}={what}")
    return SearchSpace(tuple(entries), tuple(written))


def _parse(key: str, what: str) -> SearchParameter | None:
    """Return a range or a choice; None for a single value."""
    parts = split_at_commas(what)
    if len(parts) > 1:
        if "" in parts:
            raise ConfigError(f"{key}={redact(what)}: a choice is empty; write null for no value, '' for an empty text")
        if len(set(parts)) < len(parts):
            raise ConfigError(f"{key}={redact(what)}: a choice is there twice")
        return SearchChoice(key, tuple(parts))
    call = _CALL.fullmatch(what)
    if call is None:
        return None
    name, inner = call[1], split_at_commas(call[2])
    if name not in _RANGES:
        raise ConfigError(
            f"{key}={redact(what)}: {name}() is not known{did_you_mean(name, _RANGES)}; there are "
            f"{', '.join(_RANGES)}, choices such as 4,8,16, and values; quote a text that has brackets"
        )
    counts, example, make = _RANGES[name]
    if len(inner) not in counts:
        raise ConfigError(f"{key}={redact(what)}: write {example}")
    numbers = [_number(key, what, part) for part in inner]
    found = make(key, numbers)
    if not found.low < found.high:
        raise ConfigError(f"{key}={redact(what)}: the lower end comes first, and is less than the upper one")
    if found.is_log and found.low <= 0:
        raise ConfigError(f"{key}={redact(what)}: a logarithmic range begins above 0")
    length = float(found.high) - found.low
    if not math.isfinite(length / (found.step or 1.0)):
        raise ConfigError(f"{key}={redact(what)}: the ends are too far apart to be told in numbers")
    if found.step is not None and not 0 < found.step <= length:
        raise ConfigError(f"{key}={redact(what)}: the step is above 0, and no more than the range is long")
    if name in ("int", "logint") and not all(isinstance(number, int) for number in numbers):
        raise ConfigError(f"{key}={redact(what)}: {name}() takes whole numbers; write uniform() or log() for others")
    return found if found.step is None else replace(found, high=found.point(found.size - 1))


def _number(key: str, what: str, text: str) -> float:
    try:
        number = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        number = math.nan
    if isinstance(number, int) and abs(number) > LARGEST_WHOLE:
        raise ConfigError(f"{key}={redact(what)}: whole numbers are searched up to {LARGEST_WHOLE:,}")
    if not math.isfinite(number):
        raise ConfigError(f"{key}={redact(what)}: {redact(text)!r} is not a number")
    return number


def _between(key: str, numbers: Sequence[float]) -> SearchRange:
    return SearchRange(key, float(numbers[0]), float(numbers[1]))


def _logarithmic(key: str, numbers: Sequence[float]) -> SearchRange:
    return SearchRange(key, float(numbers[0]), float(numbers[1]), is_log=True)


def _whole(key: str, numbers: Sequence[float]) -> SearchRange:
    return SearchRange(key, numbers[0], numbers[1], step=numbers[2] if len(numbers) > 2 else 1)


def _whole_logarithmic(key: str, numbers: Sequence[float]) -> SearchRange:
    return SearchRange(key, numbers[0], numbers[1], is_log=True)


def _stepped(key: str, numbers: Sequence[float]) -> SearchRange:
    low, high, step = numbers
    if all(isinstance(number, int) for number in numbers):
        return SearchRange(key, low, high, step=step)
    return SearchRange(key, float(low), float(high), step=float(step))


_RANGES: dict[str, tuple[tuple[int, ...], str, Callable[[str, Sequence[float]], SearchRange]]] = {
    "log": ((2,), "log(1e-5,1e-2)", _logarithmic),
    "uniform": ((2,), "uniform(0,0.5)", _between),
    "int": ((2, 3), "int(1,8) or int(16,128,16)", _whole),
    "logint": ((2,), "logint(16,1024)", _whole_logarithmic),
    "range": ((3,), "range(0.1,0.5,0.1)", _stepped),
}


def split_at_commas(text: str) -> list[str]:
    """Split text at the commas that are in no brackets and no quotes."""
    parts, part, depth, quote = list[str](), "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not part.strip():
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(part.strip())
            part = ""
            continue
        part += letter
    return [*parts, part.strip()]
