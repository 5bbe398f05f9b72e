"""Validate the parameters of components against their signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.config.nested import check_nested
from etude.reading.check import check_value
from etude.reading.origins import Problem
from etude.reading.suggest import unknown
from etude.reading.yaml12 import Path
from etude.signatures import Signature
from etude.signatures.nested import find_nested


def check_params(
    signature: Signature, given: Mapping[str, Any], stored: Mapping[str, Any], path: Path, supplied: frozenset[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the parameters as the component will get them, and what is wrong with them."""
    names = [parameter.name for parameter in signature.parameters]
    problems = [
        Problem((*path, p.name), "required, and missing")
        for p in signature.parameters
        if p.required and p.name not in given
    ]
    accepted: dict[str, Any] = {}
    for name, value in given.items():
        parameter = signature.get(name)
        if parameter is not None:
            accepted[name], found = check_value(parameter.annotation, value, stored.get(name), (*path, name))
            said = find_nested(parameter.annotation)
            if said is not None and not found:
                found = check_nested(said, value, stored.get(name), (*path, name), given, check_inside)
            problems += found
        elif name in supplied:
            problems.append(Problem((*path, name), "is passed by the framework and cannot be set here"))
        elif signature.open:
            accepted[name] = value
        else:
            problems.append(Problem((*path, name), unknown(name, names)))
    return accepted, problems


def check_inside(
    signature: Signature, given: Mapping[str, Any], stored: Any, path: Path, supplied: frozenset[str]
) -> list[Problem]:
    """Return what is wrong with parameters that stand inside of another."""
    inner = stored if isinstance(stored, Mapping) else dict.fromkeys(given, stored)
    return check_params(signature, given, inner, path, supplied)[1]
