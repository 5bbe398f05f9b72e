"""Read a model's file with the files it builds on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from etude.errors import ConfigError, as_path
from etude.policies.graph.merge import merge
from etude.policies.graph.tree import Item, WrittenAt, from_plain, path_text
from etude.reading.compose import EachFileOnce, read_file
from etude.reading.origins import Layer
from etude.reading.yaml12 import Path


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Item:
    """Return the tree of a file, with its `defaults` below it, or of a dictionary."""
    if isinstance(source, Mapping):
        item = from_plain(source, WrittenAt("the dictionary"))
        if "defaults" in item.value:
            raise item.value["defaults"].place.error("files to build on belong in a file; merge dictionaries yourself")
        return merge(None, item)
    path = str(as_path(source, "the file of a model").expanduser())
    if "\0" in path:
        raise ConfigError(f"no such file: {path!r}")
    return _ModelComposer().files.file(path, "")


class _ModelComposer:
    def __init__(self) -> None:
        self.files = EachFileOnce(self._compose)

    def _compose(self, path: str, named_at: str) -> Item:
        layer = read_file(path, named_at)
        own = _located(layer.values, (), layer)
        entries = own.value.pop("defaults", None)
        base: Item | None = None
        for entry in entries.listed("defaults") if entries is not None else ():
            named = entry
            if isinstance(entry.value, dict) and len(entry.value) == 1:
                (named,) = entry.value.values()
            name = os.path.expanduser(named.text("a file to build on"))
            base = merge(base, self.files.file(locate(name, path, named.place), f"{named.place}: "))
        return merge(base, own)


def locate(name: str, file: str, place: WrittenAt) -> str:
    """Return where a file is that another one names: beside it, or in the working directory."""
    if "${" in name or "\0" in name:
        raise place.error(f"{name[:80]!r} must be the plain name of a file")
    beside = os.path.join(os.path.dirname(file), name)
    for candidate in (beside, name):
        if os.path.exists(candidate):
            return candidate
    tried = " nor ".join(dict.fromkeys((os.path.abspath(beside), os.path.abspath(name))))
    raise place.error(f"there is {'neither' if ' nor ' in tried else 'no'} {tried}")


def _located(value: Any, at: Path, layer: Layer) -> Item:
    origin = layer.origin(at)
    place = WrittenAt(origin.file, origin.line, origin.column, path_text(at))
    if isinstance(value, dict):
        return Item({key: _located(item, (*at, key), layer) for key, item in value.items()}, place)
    if isinstance(value, list):
        return Item([_located(item, (*at, index), layer) for index, item in enumerate(value)], place)
    return Item(value, place)
