"""Configurations as plain values: as they are stored, and as one line shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from etude.reading.interpolate import Interpolation, escape


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return nested mappings and lists with each value in them as `leaf` makes it; keys become text, tuples lists."""
    if isinstance(value, Mapping):
        return {str(key): map_leaves(item, leaf) for key, item in value.items()}
    return [map_leaves(item, leaf) for item in value] if isinstance(value, list | tuple) else leaf(value)


def overlay(base: Any, given: Any) -> Any:
    """Lay what was given over the defaults, as it was written; an empty section leaves its defaults."""
    if given is None and isinstance(base, dict):
        return base
    if isinstance(base, dict) and isinstance(given, dict):
        return {key: overlay(base[key], given[key]) if key in given else base[key] for key in base} | {
            key: value for key, value in given.items() if key not in base
        }
    return given


def clean(value: Any, *, escaped: bool = True) -> Any:
    """Return values that YAML can hold; `escaped` ones read back to the same text where they contain `${`."""
    if isinstance(value, dict):
        return {key: clean(item, escaped=escaped) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item, escaped=escaped) for item in value]
    if isinstance(value, Interpolation) or not isinstance(value, str):
        return str(value) if isinstance(value, str) else value
    return escape(value) if escaped and "${" in value else value


def show_value(value: Any) -> str:
    """Return one value as text on one line."""
    if isinstance(value, str):
        return value if value and "\n" not in value else repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(show_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
