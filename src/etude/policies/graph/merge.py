"""Lay one tree over another, and put templates in their places.

Mappings are merged key by key, in the order of the first and then of the second: the order decides in which order
modules are made, and so their weights. Lists and plain values are replaced, unless the upper one says otherwise:

    layers: {_merge_: append, _value_: [...]}                 # or prepend, or replace (also a mapping)
    nodes: {_merge_: keyed, key: name, _value_: [...]}        # items of the same name are merged, others appended
"""

from __future__ import annotations

from etude.policies.graph.tree import Budget, Item, kind
from etude.reading.suggest import did_you_mean

_WAYS = ("replace", "append", "prepend", "keyed")


def merge(base: Item | None, own: Item) -> Item:
    """Return `own` over `base`; no merge directive is left, also where there is nothing to merge with."""
    if isinstance(own.value, dict):
        if "_merge_" in own.value:
            return _directed(base, own)
        if "_value_" in own.value:
            raise own.value["_value_"].place.error("unknown key; it needs _merge_ beside it")
        under = base.value if base is not None and isinstance(base.value, dict) else {}
        merged = {key: merge(under.get(key), item) for key, item in own.value.items()}
        return Item({**under, **merged}, own.place)
    if isinstance(own.value, list):
        return Item([merge(None, item) for item in own.value], own.place)
    return own


def _directed(base: Item | None, own: Item) -> Item:
    keys = own.only(("_merge_", "_value_", "key"))
    way = keys["_merge_"].text("_merge_")
    if way not in _WAYS:
        raise keys["_merge_"].place.error(f"unknown way to merge {way[:80]!r}{did_you_mean(way, _WAYS)}; {_WAYS}")
    if "_value_" not in keys:
        raise own.place.error("_merge_ needs _value_ beside it")
    if ("key" in keys) != (way == "keyed"):
        raise own.place.error("'key' names the field by which items are matched, with _merge_: keyed and only there")
    value = merge(None, keys["_value_"])
    if way == "replace":
        return value
    items = value.listed("_value_")
    if base is not None and not isinstance(base.value, list):
        raise own.place.error(f"there is no list to {way} to: below is {kind(base.value)}")
    below = list(base.value) if base is not None else []
    if way == "keyed":
        return Item(_keyed(below, items, keys["key"].text("key")), own.place)
    return Item([*below, *items] if way == "append" else [*items, *below], own.place)


def _keyed(below: list[Item], items: list[Item], field: str) -> list[Item]:
    merged = {_identity(item, field): item for item in below}
    for item in items:
        name = _identity(item, field)
        merged[name] = merge(merged.get(name), item)
    return list(merged.values())


def _identity(item: Item, field: str) -> str:
    found = item.mapping("an item to be matched by key").get(field)
    if found is None:
        raise item.place.error(f"has no {field!r}, by which the items are matched")
    return repr(found.plain())


class Templates:
    """Puts `{_template_: name, ...}` in place: the template, with the keys beside it on top."""

    def __init__(self, templates: dict[str, Item]) -> None:
        self.templates = templates
        self.budget = Budget()
        self.under_way: list[str] = []

    def expand(self, item: Item, depth: int = 0) -> Item:
        """Return an item without templates."""
        self.budget.spend(item.place, depth)
        if isinstance(item.value, list):
            return Item([self.expand(inner, depth + 1) for inner in item.value], item.place)
        if not isinstance(item.value, dict):
            return item
        if "_template_" not in item.value:
            return Item({key: self.expand(inner, depth + 1) for key, inner in item.value.items()}, item.place)
        named = item.value["_template_"]
        name = named.text("_template_")
        if name not in self.templates:
            near = did_you_mean(name, self.templates) or f"; known: {', '.join(self.templates) or 'none'}"
            raise named.place.error(f"there is no template {name[:80]!r}{near}")
        if name in self.under_way:
            circle = [*self.under_way[self.under_way.index(name) :], name]
            raise named.place.error(f"templates go round in a circle: {' -> '.join(circle)}")
        self.under_way.append(name)
        base = self.expand(self.templates[name], depth + 1)
        self.under_way.pop()
        rest = {key: inner for key, inner in item.value.items() if key != "_template_"}
        if not rest:
            return Item(base.value, item.place)
        own = self.expand(Item(rest, item.place), depth + 1)
        return merge(base, own)
