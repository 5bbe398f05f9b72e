"""Put a file in other words: keys are moved one by one, and keep their own file, line and name in every error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from etude.reading.interpolate import Interpolated, Interpolation
from etude.reading.origins import DEFAULT, Layer, Origin, Problem, dotted, leaves, lookup, refuse
from etude.reading.suggest import unknown
from etude.reading.yaml12 import Path


class Translation:
    """A tree under translation: `move` what there may be, then `finish`, which refuses what nobody moved."""

    def __init__(self, layer: Layer, tree: Interpolated) -> None:
        self.layer, self._tree = layer, tree
        self._values: dict[str, Any] = {}
        self._stored: dict[str, Any] = {}
        self._origins: dict[Path, Origin] = {(): layer.origin(())}
        self._known: set[Path] = set()
        self._sections: set[Path] = set()
        self._problems: list[Problem] = []

    def move(
        self, theirs: str, ours: str, convert: Callable[[Any], Any] | None = None, *, keep_null: bool = False
    ) -> None:
        """Carry the value at one key, if there is one, to another.

        Args:
            theirs: The key in the file.
            ours: Where it belongs.
            convert: Makes our value of theirs; a ValueError of it says what is wrong.
            keep_null: Whether null is a value rather than none.
        """
        source, target = tuple(theirs.split(".")), _place(ours)
        self._known.add(source)
        value, stored = lookup(self._tree.values, source), lookup(self._tree.stored, source)
        if value is None and stored is None and not keep_null:
            return
        if convert is not None:
            if self.comes_from_environment(theirs):
                self._problems.append(Problem(source, "cannot come from the environment; write it out"))
                return
            try:
                value = stored = convert(value)
            except ValueError as error:
                self._problems.append(Problem(source, str(error)))
                return
        else:
            inside = [path for path in self.layer.origins if path[: len(source)] == source]
            self._origins |= {
                target + path[len(source) :]: replace(self.layer.origins[path], key=dotted(path)) for path in inside
            }
        self._origins[target] = replace(self.layer.origin(source), key=theirs)
        _put(self._values, target, value)
        _put(self._stored, target, stored)

    def put(self, ours: str, value: Any, theirs: str = "") -> None:
        """Set one of our keys; errors name a key of the file that it follows from, if there is one."""
        target = _place(ours)
        self._origins[target] = replace(self.layer.origin(tuple(theirs.split("."))), key=theirs) if theirs else DEFAULT
        _put(self._values, target, value)
        _put(self._stored, target, value)

    def drop(self, theirs: str, check: Callable[[Any], Any]) -> None:
        """Take note of a key that nothing of ours stands for, once it is checked."""
        self._known.add(tuple(theirs.split(".")))
        value = self.value(theirs)
        if value is not None:
            try:
                check(value)
            except ValueError as error:
                self.fault(theirs, str(error))

    def value(self, theirs: str, otherwise: Any = None) -> Any:
        """Return the value at a key of the file."""
        found = lookup(self._tree.values, tuple(theirs.split(".")))
        return otherwise if found is None else found

    def comes_from_environment(self, theirs: str) -> bool:
        """Tell whether a part of a value is kept out of what is stored."""
        stored = lookup(self._tree.stored, tuple(theirs.split(".")))
        return any(isinstance(text, Interpolation) for _, text in leaves(stored))

    def origin(self, theirs: str) -> Origin:
        """Return where a key of the file was set."""
        return self.layer.origin(tuple(theirs.split(".")))

    def section(self, theirs: str, missing: str = "", *, short: bool = False) -> dict[str, Any]:
        """Return the mapping at a key of the file, empty where there is none.

        Args:
            theirs: The key.
            missing: What to say if it is not there; nothing if it need not be.
            short: Whether text will do as well.
        """
        self._sections.add(tuple(theirs.split(".")))
        found = self.value(theirs)
        if found is None and missing:
            self.fault(theirs, f"is missing; {missing}")
        elif found is not None and not isinstance(found, dict) and not (short and isinstance(found, str)):
            self.fault(theirs, "expected a mapping")
        return found if isinstance(found, dict) else {}

    def fault(self, theirs: str, message: str) -> None:
        """Take note of a mistake at a key of the file."""
        self._problems.append(Problem(tuple(theirs.split(".")), message))

    def finish(self) -> tuple[Layer, Interpolated]:
        """Return the translated tree; raise `ConfigError` with every key that nobody moved."""
        self._refuse_rest(self._tree.values, ())
        if self._problems:
            raise refuse(self._problems, self.layer)
        return Layer(self._values, self._origins), Interpolated(self._values, self._stored, [])

    def _refuse_rest(self, values: dict[str, Any], path: Path) -> None:
        known = sorted(k for k in self._known | self._sections if len(k) > len(path) and k[: len(path)] == path)
        names = list(dict.fromkeys(str(k[len(path)]) for k in known))
        for key, value in values.items():
            here = (*path, key)
            if here in self._known:
                continue
            if key not in names:
                self._problems.append(Problem(here, unknown(key, names)))
            elif isinstance(value, dict):
                self._refuse_rest(value, here)
            elif value is not None and here not in self._sections:
                self._problems.append(Problem(here, "expected a mapping"))


def _place(ours: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in ours.split("."))  # numbers index lists


def _put(tree: Any, path: Path, value: Any) -> None:
    for key, following in pairwise(path):  # what was moved whole is the file's own, and copied before it is changed
        inner = tree[key] if isinstance(tree, list) else tree.get(key)
        kind: Any = list if isinstance(following, int) else dict
        tree[key] = tree = kind(inner) if isinstance(inner, kind) else kind()
    tree[path[-1]] = value
