"""Put a file in other words: keys are moved one by one, and keep their own file, line and name in every error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from etude.reading.interpolate import Interpolated, Interpolation
from etude.reading.origins import Layer, Origin, Problem, dotted, leaves, lookup, refuse
from etude.reading.suggest import unknown
from etude.reading.yaml12 import Path


class Translation:
    """A tree under translation: `move` what there may be, then `finish`, which refuses what nobody moved."""

    def __init__(self, layer: Layer, tree: Interpolated) -> None:
        self._layer, self._tree = layer, tree
        self._values: dict[str, Any] = {}
        self._stored: dict[str, Any] = {}
        self._origins: dict[Path, Origin] = {(): layer.origin(())}
        self._known: set[Path] = set()
        self._problems: list[Problem] = []

    def move(self, theirs: str, ours: str, convert: Callable[[Any], Any] | None = None) -> None:
        """Carry the value at one key, if there is one, to another.

        Args:
            theirs: The key in the file.
            ours: Where it belongs.
            convert: Makes our value of theirs; a ValueError of it says what is wrong.
        """
        source, target = tuple(theirs.split(".")), tuple(ours.split("."))
        self._known.add(source)
        value, stored = lookup(self._tree.values, source), lookup(self._tree.stored, source)
        if value is None and stored is None:
            return
        if convert is not None:
            if any(isinstance(text, Interpolation) for _, text in leaves(stored)):
                self._problems.append(Problem(source, "cannot come from the environment; write it out"))
                return
            try:
                value = stored = convert(value)
            except ValueError as error:
                self._problems.append(Problem(source, str(error)))
                return
        else:
            inside = [path for path in self._layer.origins if path[: len(source)] == source]
            self._origins |= {
                target + path[len(source) :]: replace(self._layer.origins[path], key=dotted(path)) for path in inside
            }
        self._origins[target] = replace(self._layer.origin(source), key=theirs)
        _put(self._values, target, value)
        _put(self._stored, target, stored)

    def finish(self) -> tuple[Layer, Interpolated]:
        """Return the translated tree; raise `ConfigError` with every key that nobody moved."""
        self._refuse_rest(self._tree.values, ())
        if self._problems:
            raise refuse(self._problems, self._layer)
        return Layer(self._values, self._origins), Interpolated(self._values, self._stored, [])

    def _refuse_rest(self, values: dict[str, Any], path: Path) -> None:
        names = list(dict.fromkeys(str(k[len(path)]) for k in sorted(self._known) if k[: len(path)] == path))
        for key, value in values.items():
            here = (*path, key)
            if here in self._known:
                continue
            if key not in names:
                self._problems.append(Problem(here, unknown(key, names)))
            elif isinstance(value, dict):
                self._refuse_rest(value, here)
            elif value is not None:
                self._problems.append(Problem(here, "expected a mapping"))


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
