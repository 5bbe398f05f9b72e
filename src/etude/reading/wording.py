"""Say what is wrong with a value in words that a user knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.reading.interpolate import Interpolation
from etude.reading.origins import Problem
from etude.reading.suggest import did_you_mean
from etude.reading.yaml12 import Path

_EXPECTED = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number", "float_type": "a number", "float_parsing": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "bool_parsing": "true or false",
    "string_type": "text", "string_sub_type": "text", "list_type": "a list", "tuple_type": "a list",
    "set_type": "a list", "frozen_set_type": "a list", "dict_type": "a mapping", "mapping_type": "a mapping",
    "model_type": "a mapping", "model_attributes_type": "a mapping", "dataclass_type": "a mapping",
    "none_required": "null", "path_type": "a path",
}  # fmt: skip
_BOUNDS = {
    "greater_than": ("more than", "gt"), "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"), "less_than_equal": ("at most", "le"),
}  # fmt: skip


def show(value: Any) -> str:
    """Return a value as short text for a message."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(str(value) if isinstance(value, Interpolation) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def explain_errors(errors: list[Any], value: Any, stored: Any, base: Path) -> list[Problem]:
    """Turn the errors of pydantic into problems; the alternatives of a union become one."""
    wanted: dict[Path, list[str]] = {}
    others: list[Problem] = []
    given: dict[Path, str] = {}
    for error in errors:
        path, inside = _locate(error["loc"], value, error["type"] == "missing")
        where = (*base, *path)
        shown = _stored(stored, path)
        hidden = isinstance(shown, Interpolation)
        given[where] = show(shown if hidden else inside)
        kind = error["type"]
        if kind == "extra_forbidden":
            continue  # found beforehand, with the name that may be meant
        if kind in _EXPECTED:
            wanted.setdefault(where, []).append(_EXPECTED[kind])
        elif kind in ("literal_error", "enum"):
            choices = str(error["ctx"]["expected"])
            words = re.findall(r"'([^']*)'", choices)
            near = did_you_mean(inside, words) if isinstance(inside, str) and not hidden else ""
            wanted.setdefault(where, []).append(choices + near)
        elif kind == "missing":
            others.append(Problem(where, "required, and missing"))
        else:
            others.append(Problem(where, _sentence(error, hidden, given[where])))
    for where, kinds in wanted.items():
        text, mark, near = " or ".join(dict.fromkeys(kinds)).partition("; did")
        others.append(Problem(where, f"expected {text}, got {given[where]}{mark}{near}"))
    return others


def _sentence(error: Any, hidden: bool, given: str) -> str:
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, got {given}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "value_error":
        # The text of a custom check may quote the value, which for a secret it must not.
        return f"{given} is not valid here" if hidden else str(context.get("error", error["msg"]))
    message = str(error["msg"]).replace("Input should", "should").replace("Value error, ", "")
    return f"{given} is not valid here" if hidden else f"{message}, got {given}"


def _locate(loc: tuple[Any, ...], value: Any, missing: bool) -> tuple[Path, Any]:
    """Follow a location of pydantic as far as it names keys; the rest names members of a union."""
    path: list[Any] = []
    for index, part in enumerate(loc):
        is_key = isinstance(value, Mapping) and part in value
        if is_key or (isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif missing and index == len(loc) - 1:
            path.append(part)
            break
        elif isinstance(part, str):
            continue
        else:
            break
        path.append(part)
    return tuple(path), value


def _stored(tree: Any, path: Path) -> Any:
    for key in path:
        if isinstance(tree, Interpolation):
            return tree
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
