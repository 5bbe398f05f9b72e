"""Where each value comes from, and how a mistake is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from etude.errors import ConfigError
from etude.reading.yaml12 import Path
from etude.secrets import redact


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """A place in a file, an override on the command line, or the default."""

    file: str = ""
    line: int = 0
    column: int = 0
    override: str = ""
    key: str = ""
    """What the file calls a key that was translated; empty where it is called as here."""

    def __str__(self) -> str:
        if self.override:
            return f"override {self.override!r}"
        return f"{self.file}:{self.line}:{self.column}" if self.file else "default"


DEFAULT = Origin()


@dataclass
class Layer:
    """A tree of values with the origin of each key."""

    values: dict[str, Any]
    origins: dict[Path, Origin] = field(default_factory=dict)

    def origin(self, path: Path) -> Origin:
        """Return the origin of a key, or of the nearest one around it."""
        return self._nearest(path)[0]

    def name(self, path: Path) -> str:
        """Return a key as its file calls it."""
        origin, rest = self._nearest(path)
        return dotted((origin.key, *rest) if origin.key else path)

    def _nearest(self, path: Path) -> tuple[Origin, Path]:
        for length in range(len(path), -1, -1):
            found = self.origins.get(path[:length])
            if found is not None:
                return found, path[length:]
        return DEFAULT, path


def dotted(path: Path) -> str:
    """Return a path as people write it: `loggers.0.params.project`."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a configuration."""

    path: Path
    message: str


def refuse(problems: Iterable[Problem], layer: Layer) -> ConfigError:
    """Return one error that lists every problem, one a line, in the order of the files."""
    lines = []
    for problem in problems:
        origin = layer.origin(problem.path)
        text = ": ".join(filter(None, (str(origin), layer.name(problem.path), problem.message)))
        lines.append((bool(origin.override), origin, redact(text)))
    return ConfigError("\n".join(dict.fromkeys(text for *_, text in sorted(lines))))


def lookup(tree: Any, path: Path) -> Any:
    """Return the value at a path; None where there is none."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def leaves(tree: Any, path: Path = (), *, whole_lists: bool = False) -> Iterable[tuple[Path, Any]]:
    """Yield every value that holds no other, with its path; an empty mapping or list counts as one.

    With `whole_lists`, so does a list of plain values.
    """
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key), whole_lists=whole_lists)
    elif isinstance(tree, list) and tree and not (whole_lists and is_flat(tree)):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index), whole_lists=whole_lists)
    else:
        yield path, tree


def is_flat(items: list[Any]) -> bool:
    """Tell whether a list holds plain values only."""
    return not any(isinstance(item, dict | list) for item in items)
