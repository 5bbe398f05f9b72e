"""Look into parameters that hold further parameters: what training would refuse inside, a check refuses too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from etude.errors import RegistryError
from etude.reading.origins import Problem
from etude.reading.suggest import unknown
from etude.reading.yaml12 import Path
from etude.registry import REGISTRIES
from etude.signatures import Signature, read_static
from etude.signatures.nested import ComponentOf, NamedParametersOf, Nested, OptionsOf, ParametersOf

Check = Callable[[Signature, Mapping[str, Any], Any, Path, frozenset[str]], list[Problem]]
"""Compares parameters with a signature."""


def check_nested(
    said: Nested, value: Any, stored: Any, path: Path, beside: Mapping[str, Any], check: Check
) -> list[Problem]:
    """Return what is wrong inside a parameter.

    Args:
        said: What its annotation says about the inside.
        value: The parameter.
        stored: The same as it is stored, with interpolations.
        path: Where it stands.
        beside: The parameters beside it.
        check: Compares parameters with a signature.
    """
    if isinstance(said, ComponentOf):
        return _check_component(said.registry, value, stored, path, check)
    if not isinstance(value, Mapping):
        return []
    if isinstance(said, ParametersOf):
        signature = read_static(said.target)
        return [] if signature is None else check(signature, value, stored, path, frozenset())
    if isinstance(said, NamedParametersOf):
        return _check_named(said, value, stored, path, check)
    return _check_options(said, value, stored, path, beside, check)


def _check_named(
    said: NamedParametersOf, value: Mapping[str, Any], stored: Any, path: Path, check: Check
) -> list[Problem]:
    problems: list[Problem] = []
    for name, given in value.items():
        kept = stored.get(name) if isinstance(stored, Mapping) else stored
        problems += check_nested(ParametersOf(said.target), given, kept, (*path, name), value, check)
    return problems


def _check_component(kind: str, value: Any, stored: Any, path: Path, check: Check) -> list[Problem]:
    registry = REGISTRIES[kind]
    given = {"type": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        return []
    problems = [
        Problem((*path, key), unknown(key, ["type", "params"])) for key in given if key not in ("type", "params")
    ]
    params, where = given.get("params"), path if isinstance(value, str) else (*path, "type")
    if registry.is_file(given["type"]):  # of the user's, which is read when it is used
        return problems
    try:
        signature = registry.signature(given["type"])
    except RegistryError as error:
        return [*problems, Problem(where, str(error))]
    if params is not None and not isinstance(params, Mapping):
        return [*problems, Problem((*path, "params"), f"expected a mapping, got {type(params).__name__}")]
    kept = stored.get("params") if isinstance(stored, Mapping) else stored
    inside = where if isinstance(value, str) else (*path, "params")
    return problems + check(signature, params or {}, kept, inside, registry.supplied_to(given["type"]))


def _check_options(
    said: OptionsOf, value: Mapping[str, Any], stored: Any, path: Path, beside: Mapping[str, Any], check: Check
) -> list[Problem]:
    names = beside.get(said.parameter)
    registry = REGISTRIES["environments"]
    for name in [names] if isinstance(names, str) else names if isinstance(names, list) else []:
        key, mark, _ = _cut(name) if isinstance(name, str) else ("", "", "")
        if key not in registry:
            continue  # refused, with the names there are, by whoever makes it
        signature = registry.signature(key)
        first = [p.name for p in signature.parameters[:1]]  # what follows the key is its first argument
        hidden = first if mark or signature.parameters[0].required else []
        problems = check(signature.without(hidden), value, stored, path, frozenset(hidden))
        if problems:
            return problems
    return []


def _cut(name: str) -> tuple[str, str, str]:
    return min((name.partition(mark) for mark in "/:"), key=lambda parts: len(parts[0]))
