"""Replace `${a.b[0]}` by the value at that key, and `${env:int:NAME,default}` by the environment.

A reference that is a whole value keeps the type of what it names; inside of text it becomes text. `$${` stands for
the characters `${`.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from etude.errors import ConfigError
from etude.policies.graph.tree import Budget, Item, WrittenAt, from_plain, path_text
from etude.reading.suggest import did_you_mean
from etude.secrets import register_secret

MAX_TEXT = 1 << 20
MAX_REMOVES = 150
"""References behind references, and the levels between them."""

_REFERENCE = re.compile(r"(?<!\$)\$\{([^{}]*)\}")
_START = re.compile(r"(?<!\$)\$\{")
_KEYS = re.compile(r"[\w-]+(?:\.[\w-]+|\[[0-9]+\])*")
_ENVIRONMENT = re.compile(r"env:\s*(?:(int|float|bool|json):)?\s*([A-Za-z_]\w*)\s*(?:,(.*))?", re.DOTALL)
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

Path = tuple[str | int, ...]


class References:
    """Resolves the references of a tree."""

    def __init__(self, root: Item) -> None:
        self.root = root
        self.budget = Budget()
        self.done: dict[Path, tuple[Item, int]] = {}
        self.under_way: list[Path] = []
        self.named: set[str] = set()
        """Keys of the top that something refers to."""

    def resolve(self, path: Path = ()) -> Item:
        """Return the item at a path with every reference in it replaced."""
        raw = self._raw(path)
        if path in self.done:
            item, size = self.done[path]
            self.budget.spend(raw.place, 0, size)
            return item
        if path in self.under_way:
            circle = [*self.under_way[self.under_way.index(path) :], path]
            texts = dict.fromkeys(path_text(one) or "the file" for one in circle)
            raise raw.place.error(f"refers to itself: {' -> '.join(texts)}"[:400])
        if len(self.under_way) > MAX_REMOVES:
            raise raw.place.error(f"refers to other values more than {MAX_REMOVES} times removed")
        before = self.budget.left
        self.budget.spend(raw.place, 0)
        self.under_way.append(path)
        item = self._item(raw, path)
        self.under_way.pop()
        self.done[path] = item, before - self.budget.left
        return item

    def _raw(self, path: Path) -> Item:
        item = self.root
        for key in path:
            item = item.value[key]
        return item

    def _item(self, raw: Item, path: Path) -> Item:
        if isinstance(raw.value, dict):
            return Item({key: self.resolve((*path, key)) for key in raw.value}, raw.place)
        if isinstance(raw.value, list):
            return Item([self.resolve((*path, index)) for index in range(len(raw.value))], raw.place)
        if not isinstance(raw.value, str) or not _START.search(raw.value):
            return raw
        whole = _REFERENCE.fullmatch(raw.value)
        if whole:
            return Item(self._reference(whole[1], raw.place).value, raw.place)
        text = _REFERENCE.sub(lambda match: self._inside(match[1], raw.place), raw.value)
        # What was put in is not read again; only what cannot be read as a reference is left from the text itself.
        if len(_START.findall(raw.value)) != len(_REFERENCE.findall(raw.value)):
            raise raw.place.error(f"cannot read {raw.value[:60]!r}; write ${{a.b}}, ${{env:NAME,default}}, or $${{")
        if len(text) > MAX_TEXT:
            raise raw.place.error("grows too large when its references are replaced")
        return Item(text, raw.place)

    def _inside(self, written: str, place: WrittenAt) -> str:
        value = self._reference(written, place).plain()
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        if len(text) > MAX_TEXT:
            raise place.error("grows too large when its references are replaced")
        return text

    def _reference(self, written: str, place: WrittenAt) -> Item:
        written = written.strip()
        variable = _ENVIRONMENT.fullmatch(written)
        if variable:
            return from_plain(_from_environment(variable, place), place)
        if not _KEYS.fullmatch(written):
            raise place.error(
                f"cannot read ${{{written[:60]}}}; write ${{a.b[0]}}, ${{env:NAME}} or ${{env:int:NAME,0}}"
            )
        item: Item | None = self.root
        path: Path = ()
        inside = False  # of something that is resolved already
        for key in re.findall(r"[\w-]+", written):
            assert item is not None
            if isinstance(item.value, str) and not inside:
                item, inside = self.resolve(path), True
            step: str | int = int(key[:9]) if isinstance(item.value, list) and key.isdecimal() else key
            found = _child(item, step)
            if found is None:
                near = did_you_mean(key, item.value) if isinstance(item.value, dict) else ""
                raise place.error(f"${{{written[:60]}}} names nothing in this file{near}")
            item, path = found, (*path, step)
        self.named.add(str(path[0]))
        assert item is not None
        return item if inside else self.resolve(path)


def _child(item: Item, step: str | int) -> Item | None:
    value = item.value
    if isinstance(value, dict):
        found: Item | None = value.get(step)
        return found
    return value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None


def _from_environment(match: re.Match[str], place: WrittenAt) -> Any:
    as_type, name, default = match[1], match[2], match[3]
    text = os.environ.get(name, default)
    if text is None:
        raise place.error(f"the environment variable {name} is not set; export it, or write ${{env:{name},default}}")
    if as_type is None:
        register_secret(os.environ.get(name, ""))
        return text
    try:
        return _cast(as_type, text.strip())
    except (ValueError, KeyError, RecursionError):
        known = name in os.environ
        where = f"the environment variable {name}" if known else "the default"
        raise place.error(f"{where} is no {as_type}" + ("" if known else f": {text[:60]!r}")) from None


def _cast(as_type: str, text: str) -> Any:
    if as_type == "json":
        return json.loads(text, parse_constant=_refuse)
    if as_type == "bool":
        return _TRUTHS[text.lower()]
    return int(text) if as_type == "int" else float(text)


def _refuse(constant: str) -> Any:
    raise ConfigError(f"{constant} is no value")
