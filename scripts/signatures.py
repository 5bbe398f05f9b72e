"""Write the signatures of Etude's own components into the package: `.venv/bin/python scripts/signatures.py`."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from etude.builtins import BUILTINS
from etude.registry import REGISTRIES
from etude.signatures import Parameter, Signature, parse_static
from etude.signatures.nested import MARKERS, NamedParametersOf, ParametersOf, find_nested
from etude.signatures.source import SOURCES
from etude.signatures.stored import FILE, from_line, read_type


def generate() -> str:
    """Return what the file should hold: a line for each component that Etude's sources alone describe."""
    lines: dict[str, str] = {}
    waiting = [one.target for registry in REGISTRIES.values() for one in registry.builtins.values()]
    waiting += [f"etude.{where}" for places in BUILTINS.values() for where in places.values()]
    SOURCES.clear()
    while waiting:
        target = waiting.pop()
        signature = parse_static(target)
        if _forget_foreign() or target in lines or signature is None:
            continue
        lines[target] = _line(target, signature)
        said = [find_nested(parameter.annotation) for parameter in signature.parameters]
        waiting += [nested.target for nested in said if isinstance(nested, ParametersOf | NamedParametersOf)]
    return "".join(f"{lines[target]}\n" for target in sorted(lines) if lines[target])


def _forget_foreign() -> list[str]:
    """Return what was read of other packages, whose word depends on their version, and forget it for the next."""
    foreign = [module for module in SOURCES if module.partition(".")[0] not in {"etude", *sys.stdlib_module_names}]
    for module in foreign:
        del SOURCES[module]
    return foreign


def _line(target: str, signature: Signature) -> str:
    """Return a signature as a line; empty if it cannot be written down."""
    try:
        line = [target, signature.summary, signature.open, [_fields(one) for one in signature.parameters]]
    except TypeError:
        return ""
    # As text: two literals are equal in any order, but not the messages about them.
    return json.dumps(line, ensure_ascii=False) if repr(from_line(line)) == repr(signature) else ""


def _fields(parameter: Parameter) -> list[str]:
    plain = repr(read_type(parameter.type)) == repr(parameter.annotation)
    fields = [parameter.name, parameter.type, parameter.default, parameter.help]
    fields.append("" if plain else spell(parameter.annotation))
    while not fields[-1] and len(fields) > 3:
        fields.pop()
    return fields


def spell(annotation: Any) -> str:
    """Write a type as an annotation; refuse what has no plain spelling."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None), Any, ...):
        return {Any: "Any", ...: "..."}.get(annotation, "None")
    if annotation in (int, float, str, bool, list, dict, tuple, set, frozenset, Path):
        return str(annotation.__name__)
    if origin in (Union, types.UnionType):
        return " | ".join(map(spell, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is Annotated and isinstance(arguments[1], tuple(MARKERS.values())):
        return f"Annotated[{spell(arguments[0])}, {type(arguments[1]).__name__}({_said(arguments[1])!r})]"
    if origin in (list, dict, tuple, set, frozenset):
        return f"{origin.__name__}[{', '.join(map(spell, arguments))}]"
    raise TypeError(f"{annotation} has no plain spelling")


def _said(marker: Any) -> str:
    return str(getattr(marker, marker.__slots__[0]))


if __name__ == "__main__":
    FILE.write_text(generate(), encoding="utf-8")
