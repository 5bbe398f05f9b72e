"""Values with the place each was written at: what a model's file is while it is merged, expanded and interpolated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean
from etude.reading.yaml12 import MAX_DEPTH, MAX_NODES

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What modules, nodes and values may be called."""


@dataclass(frozen=True, slots=True)
class WrittenAt:
    """Where a value was written: a file and a line, or a dictionary, and the keys that lead to it."""

    file: str
    line: int = 0
    column: int = 0
    path: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.path}" if self.path else where

    def error(self, message: str) -> ConfigError:
        """Return the error that names this place."""
        return ConfigError(f"{self}: {message}")


@dataclass(frozen=True, slots=True)
class Item:
    """A value: a plain one, a list of items, or a mapping of items by key."""

    value: Any
    place: WrittenAt

    def mapping(self, what: str = "") -> dict[str, Item]:
        """Return the items by key; refuse anything else."""
        if not isinstance(self.value, dict):
            raise self.place.error(f"{what or 'this'} must be a mapping, not {kind(self.value)}")
        return self.value

    def listed(self, what: str = "") -> list[Item]:
        """Return the items of a list; refuse anything else."""
        if not isinstance(self.value, list):
            raise self.place.error(f"{what or 'this'} must be a list, not {kind(self.value)}")
        return self.value

    def text(self, what: str = "") -> str:
        """Return text that is not empty; refuse anything else."""
        if not isinstance(self.value, str) or not self.value:
            raise self.place.error(f"{what or 'this'} must be text, not {kind(self.value)}")
        return self.value

    def flag(self, what: str = "") -> bool:
        """Return true or false; refuse anything else."""
        if not isinstance(self.value, bool):
            raise self.place.error(f"{what or 'this'} must be true or false, not {kind(self.value)}")
        return self.value

    def name(self, what: str) -> str:
        """Return a name that can be referred to; refuse anything else."""
        text = self.text(what)
        if not NAME.fullmatch(text):
            raise self.place.error(f"{what} {text[:80]!r} must be made of letters, digits and _, without a digit first")
        return text

    def plain(self) -> Any:
        """Return the value without its places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def only(self, known: tuple[str, ...]) -> dict[str, Item]:
        """Return the items by key; refuse a key that is not known, and name the nearest one that is."""
        items = self.mapping()
        for key, item in items.items():
            if key not in known:
                near = did_you_mean(key, known)
                raise item.place.error(f"unknown key{near or '; known: ' + ', '.join(known)}")
        return items


class Budget:
    """How many values may still be made: templates and references must not multiply without end."""

    def __init__(self) -> None:
        self.left = MAX_NODES

    def spend(self, place: WrittenAt, depth: int, count: int = 1) -> None:
        """Count values; refuse more than a model needs, and deeper nesting than one has."""
        self.left -= count
        if self.left < 0:
            raise place.error(f"more than {MAX_NODES} values; do templates or references multiply?")
        if depth > MAX_DEPTH:
            raise place.error(f"nested more than {MAX_DEPTH} levels deep")


def from_plain(value: Any, place: WrittenAt, budget: Budget | None = None, depth: int = 0) -> Item:
    """Return a plain value as items; below `place` the keys are added to its path."""
    budget = budget or Budget()
    budget.spend(place, depth)
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise place.error("keys must be text")
        inner = {key: from_plain(item, _below(place, key), budget, depth + 1) for key, item in value.items()}
        return Item(inner, place)
    if isinstance(value, list | tuple):
        return Item([from_plain(v, _below(place, i), budget, depth + 1) for i, v in enumerate(value)], place)
    if value is None or isinstance(value, bool | int | float | str):
        return Item(value, place)
    raise place.error(f"a {type(value).__name__} is no plain value; write text, numbers, lists and mappings")


def path_text(path: tuple[str | int, ...]) -> str:
    """Return keys as people write them: `model.graph.nodes[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def _below(place: WrittenAt, key: str | int) -> WrittenAt:
    path = f"{place.path}[{key}]" if isinstance(key, int) else f"{place.path}.{key}".lstrip(".")
    return WrittenAt(place.file, place.line, place.column, path)


def kind(value: Any) -> str:
    """Name a value for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict | list):
        return ("an empty " if not value else "a ") + ("mapping" if isinstance(value, dict) else "list")
    return repr(value)[:80]
