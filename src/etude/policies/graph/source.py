"""Read a model's file with the files it builds on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from etude.errors import ConfigError, as_path
from etude.policies.graph.merge import merge
from etude.policies.graph.tree import Item, Place, from_plain, kind, path_text
from etude.reading import yaml12
from etude.reading.compose import EachFileOnce


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Item:
    """Return the tree of a file, with its `defaults` below it, or of a dictionary."""
    if isinstance(source, Mapping):
        item = from_plain(source, Place("the dictionary"))
        if "defaults" in item.value:
            raise item.value["defaults"].place.error("files to build on belong in a file; merge dictionaries yourself")
        return merge(None, item)
    path = str(as_path(source, "the file of a model").expanduser())
    if "\0" in path:
        raise ConfigError(f"cannot read {path!r}: embedded null byte")
    return _Composer().files.file(path, "")


class _Composer:
    def __init__(self) -> None:
        self.files = EachFileOnce(self._compose)

    def _compose(self, path: str, named_at: str) -> Item:
        own = _read_file(path, named_at)
        entries = own.value.pop("defaults", None)
        base: Item | None = None
        for entry in entries.listed("defaults") if entries is not None else ():
            named = entry
            if isinstance(entry.value, dict) and len(entry.value) == 1:
                (named,) = entry.value.values()
            name = os.path.expanduser(named.text("a file to build on"))
            base = merge(base, self.files.file(locate(name, path, named.place), f"{named.place}: "))
        return merge(base, own)


def locate(name: str, file: str, place: Place) -> str:
    """Return where a file is that another one names: beside it, or in the working directory."""
    if "${" in name or "\0" in name:
        raise place.error(f"{name[:80]!r} must be the plain name of a file")
    beside = os.path.join(os.path.dirname(file), name)
    for candidate in (beside, name):
        if os.path.exists(candidate):
            return candidate
    tried = " nor ".join(dict.fromkeys((os.path.abspath(beside), os.path.abspath(name))))
    raise place.error(f"there is {'neither' if ' nor ' in tried else 'no'} {tried}")


def _read_file(path: str, named_at: str) -> Item:
    try:
        with open(path, "rb") as file:
            data = file.read(yaml12.MAX_BYTES + 1)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise ConfigError(f"{named_at}cannot read {path!r}: {reason}") from None
    try:
        document = yaml12.read(yaml12.read_bytes(data))
    except yaml12.ReadError as error:
        raise yaml12.as_config_error(error, path) from None
    if not isinstance(document.value, dict):
        raise ConfigError(f"{path}:1:1: a model's file is a mapping of keys to values, not {kind(document.value)}")
    return _located(document.value, (), path, document.marks, (1, 1))


def _located(value: Any, at: tuple[str | int, ...], file: str, marks: Mapping[Any, Any], mark: yaml12.Mark) -> Item:
    # What an alias stands for has no marks of its own: it is where the alias is.
    mark = marks.get(at, mark)
    place = Place(file, *mark, path_text(at))
    if isinstance(value, dict):
        return Item({key: _located(item, (*at, key), file, marks, mark) for key, item in value.items()}, place)
    if isinstance(value, list):
        return Item([_located(item, (*at, i), file, marks, mark) for i, item in enumerate(value)], place)
    return Item(value, place)
