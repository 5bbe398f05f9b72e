"""Compose a configuration: the files it builds on, its own keys, then the overrides of the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from etude.errors import ConfigError
from etude.reading import yaml12
from etude.reading.origins import Layer, Origin, dotted
from etude.reading.yaml12 import Path, ReadError
from etude.secrets import redact

if TYPE_CHECKING:
    from etude.reading.dialect import Dialect


def compose(path: str | os.PathLike[str] | None, overrides: Sequence[str], dialect: Dialect[Any]) -> Layer:
    """Read a file with all it builds on, and apply overrides; nothing is interpolated or validated yet."""
    if path is None:
        layer = Layer({})
    elif "\0" in os.fspath(path):
        raise ConfigError(f"no such file: {os.fspath(path)!r}")
    else:
        layer = _Composer(dialect).files.file(dialect.locate(os.fspath(path)), "")
    dialect.complete(layer)
    for text in overrides:
        _override(layer, text)
        layer = dialect.normalize(layer, "")
        dialect.complete(layer)
    return layer


T = TypeVar("T")


class EachFileOnce(Generic[T]):
    """Composes files that build on each other: each once, however many others name it, and none in a circle.

    Args:
        compose: Makes something of a file, given its path and the head of errors about where it was named.
    """

    def __init__(self, compose: Callable[[str, str], T]) -> None:
        self.compose = compose
        self.done: dict[str, T] = {}
        self.under_way: list[str] = []

    def file(self, path: str, named_at: str) -> T:
        """Return what a file and those it builds on come to."""
        real = os.path.realpath(os.path.expanduser(path))
        if real in self.under_way:
            cycle = " -> ".join(map(os.path.basename, [*self.under_way[self.under_way.index(real) :], real]))
            raise ConfigError(f"{named_at}defaults go round in a circle: {cycle}; remove one of them")
        if real not in self.done:
            if len(self.under_way) >= yaml12.MAX_DEPTH:
                raise ConfigError(f"{named_at}defaults nested more than {yaml12.MAX_DEPTH} files deep")
            self.under_way.append(real)
            self.done[real] = self.compose(path, named_at)
            self.under_way.pop()
        return self.done[real]


class _Composer:
    def __init__(self, dialect: Dialect[Any]) -> None:
        self.dialect = dialect
        self.files = EachFileOnce(self._compose)

    def _compose(self, path: str, named_at: str) -> Layer:
        own = self.dialect.normalize(read_file(path, named_at, self.dialect.nearest), os.path.dirname(path))
        if "defaults" not in own.values:
            return own
        layers = []
        entries = own.values.pop("defaults")
        at = own.origin(("defaults",))
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            origin = own.origin(("defaults", index))
            if isinstance(entry, dict) and len(entry) == 1:
                entry = next(iter(entry.values()))
            if not isinstance(entries, list) or not isinstance(entry, str) or not entry or "\0" in entry:
                place = origin if isinstance(entries, list) else at
                raise ConfigError(f"{place}: defaults: must be a list of file names, or of {{label: file name}}")
            if "${" in entry:
                raise ConfigError(f"{origin}: defaults: ${{...}} is not available here; write the file name")
            if entry == "_self_":
                if index < len(entries) - 1:
                    raise ConfigError(f"{origin}: defaults: a file's own keys come last; move _self_ to the end")
                continue
            base = os.path.normpath(
                self.dialect.locate(os.path.expanduser(entry), os.path.dirname(path), f"{origin}: ")
            )
            layers.append(self.files.file(base, f"{origin}: "))
        return reduce(_merge, [*layers, own])


def read_file(path: str, named_at: str = "", nearest: Callable[[str], str] = lambda path: "") -> Layer:
    """Read one file; what it builds on is not looked at.

    Args:
        path: The file.
        named_at: Where it was named, at the head of errors.
        nearest: Says which file may have been meant by one that is not there.
    """
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(yaml12.MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{named_at}no such file: {path}{nearest(path)}") from None
    except OSError as error:
        raise ConfigError(f"{named_at}cannot read {path}: {error.strerror}") from None
    try:
        document = yaml12.read(yaml12.read_bytes(data))
    except ReadError as error:
        raise yaml12.as_config_error(error, path) from None
    values = {} if document.value is None else document.value
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: a configuration is a mapping of keys to values, not {_kind(values)}")
    origins = {where: Origin(path, *mark) for where, mark in document.marks.items()}
    return Layer(values, {(): Origin(path, 1, 1), **origins})


def _merge(base: Layer, over: Layer) -> Layer:
    return Layer(_merge_values(base.values, over.values), {**base.origins, **over.origins})


def _merge_values(base: Any, over: Any) -> Any:
    """Merge mappings deeply; replace everything else. Shares nothing that an override could change with the base."""
    if not isinstance(over, dict):
        return [_merge_values(None, item) for item in over] if isinstance(over, list) else over
    under = base if isinstance(base, dict) else {}
    merged = {key: _merge_values(None, value) for key, value in under.items() if key not in over}
    return {key: _merge_values(under.get(key), over[key]) if key in over else merged[key] for key in {**under, **over}}


# ---- overrides -------------------------------------------------------------------------------------------------------


def _override(layer: Layer, text: str) -> None:
    """Apply one `key=value`; the value is YAML, the key a dotted path in which numbers index lists."""
    origin = Origin(override=redact(text))
    key, equals, written = text.partition("=")
    path: Path = tuple(re.sub(r"\[(\d+)\]", r".\1", key.strip()).split("."))
    if not equals or not all(path):
        raise ConfigError(f"{origin}: write key=value, such as training.lr=1e-4")
    if key[0] in "+~":
        raise ConfigError(f"{origin}: there is no '{key[0]}'; name a key of the schema, and remove a value with =null")
    try:
        value = yaml12.read(written).value
    except ReadError as error:
        raise ConfigError(f"{origin}: {error.message}; quote text that has a meaning in YAML") from None
    if path == ("defaults",):
        raise ConfigError(f"{origin}: defaults belong in the file")
    _set(layer, path, value, origin)


def _set(layer: Layer, path: Path, value: Any, origin: Origin) -> None:
    container: Any = layer.values
    where: list[str | int] = []
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(container, list):
            name = dotted(tuple(where))
            if not isinstance(part, str) or not part.isdecimal() or int(part) >= len(container):
                size = f"{len(container)} entries" if len(container) != 1 else "1 entry"
                raise ConfigError(f"{origin}: {name} is a list of {size}; {part!r} is none of them (they count from 0)")
            part = int(part)
        elif not isinstance(container, dict):
            name = dotted(tuple(where))
            raise ConfigError(f"{origin}: {name} is {_kind(container)}, it has no {part!r}")
        where.append(part)
        if last:
            container[part] = value
        elif isinstance(container, dict) and container.get(part) is None:
            container[part] = {}
            layer.origins[tuple(where)] = origin
        container = container[part]
    stale = tuple(where)
    for known in [p for p in layer.origins if p[: len(stale)] == stale]:
        del layer.origins[known]
    layer.origins[stale] = origin


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names[type(value)]
