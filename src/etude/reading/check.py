"""Compare values with the types they must have: nothing unknown passes, and no truth value passes for a number."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, PydanticSchemaGenerationError, SecretBytes, SecretStr, TypeAdapter, ValidationError

from etude.reading.interpolate import Interpolated, Interpolation
from etude.reading.origins import Problem
from etude.reading.suggest import unknown
from etude.reading.wording import explain_errors, show
from etude.reading.yaml12 import Path

M = TypeVar("M", bound=BaseModel)


def check_model(model: type[M], tree: Interpolated) -> tuple[M | None, list[Problem]]:
    """Return a tree as a model, and what is wrong with it; with problems there may be a model or none."""
    problems = list(find_misfits(model, tree.values, tree.stored, ()))
    try:
        return model.model_validate(tree.values), problems
    except ValidationError as error:
        found = explain_errors(error.errors(include_url=False), tree.values, tree.stored, ())
        known = {problem.path for problem in problems}
        return None, problems + [problem for problem in found if problem.path not in known]


def check_value(annotation: Any, value: Any, stored: Any, path: Path) -> tuple[Any, list[Problem]]:
    """Return a value in the form its annotation asks for, and what is wrong with it."""
    if annotation is Any or type(value) is annotation:
        return value, []
    problems = list(find_misfits(annotation, value, stored, path))
    adapter = _adapter(annotation)
    if adapter is None:
        return value, problems
    try:
        checked = adapter.validate_python(value)
    except ValidationError as error:
        found = explain_errors(error.errors(include_url=False), value, stored, path)
        known = {problem.path for problem in problems}
        return value, problems + [problem for problem in found if problem.path not in known]
    if isinstance(checked, float) and checked != checked:
        problems.append(Problem(path, "NaN is not a value that anything can be set to"))
    return checked, problems


@lru_cache(maxsize=512)
def _cached_adapter(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(annotation)
    except PydanticSchemaGenerationError:
        return None


def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    try:
        return _cached_adapter(annotation)
    except TypeError:  # an annotation with metadata that cannot be hashed
        return _cached_adapter.__wrapped__(annotation)


def find_misfits(annotation: Any, value: Any, stored: Any, path: Path) -> Iterator[Problem]:
    """Find what pydantic lets pass or tells less well: unknown keys, truth values as numbers, written-out secrets."""
    members = _members(annotation)
    secret = any(member in (SecretStr, SecretBytes) for member in members)
    if secret and value is not None and not isinstance(stored, Interpolation):
        yield Problem(path, "is a secret; take it from the environment with ${env:NAME}")
    if isinstance(value, bool):
        if not _takes_bool(members):
            yield Problem(path, f"expected {_number_words(members)}, got {show(value)}")
    elif isinstance(value, int | float) and bool in members and not _takes_number(members):
        yield Problem(path, f"expected true or false, got {show(value)}")
    elif isinstance(value, dict):
        yield from _find_in_mapping(members, value, stored, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            for kind in _item_kinds(members, index):
                yield from find_misfits(kind, item, _child(stored, index), (*path, index))


def _find_in_mapping(members: list[Any], value: Mapping[str, Any], stored: Any, path: Path) -> Iterator[Problem]:
    for member in members:
        fields = _fields(member)
        if fields is None and get_origin(member) is dict:
            fields = dict.fromkeys(value, get_args(member)[1])
        if fields is None:
            continue
        for key, item in value.items():
            if key in fields:
                yield from find_misfits(fields[key], item, _child(stored, key), (*path, key))
            else:
                yield Problem((*path, key), unknown(key, list(fields)))
        return


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, without metadata."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    return [annotation]


def _takes_bool(members: list[Any]) -> bool:
    literal = any(get_origin(m) is Literal and any(isinstance(v, bool) for v in get_args(m)) for m in members)
    return literal or bool in members or not _takes_number(members)


def _takes_number(members: list[Any]) -> bool:
    return any(
        member in (int, float) or (get_origin(member) is Literal and any(type(v) is int for v in get_args(member)))
        for member in members
    )


def _number_words(members: list[Any]) -> str:
    return "a number" if float in members else "a whole number"


def _item_kinds(members: list[Any], index: int) -> list[Any]:
    for member in members:
        arguments = get_args(member)
        if get_origin(member) in (list, set, frozenset) or (get_origin(member) is tuple and arguments[-1:] == (...,)):
            return [arguments[0]]
        if get_origin(member) is tuple and index < len(arguments):
            return [arguments[index]]
    return []


def _fields(kind: Any) -> dict[str, Any] | None:
    if not isinstance(kind, type):
        return None
    if issubclass(kind, BaseModel):
        if kind.model_config.get("extra") == "allow":
            return None
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        try:
            hints = typing.get_type_hints(kind)
        except (NameError, TypeError):
            hints = dict.fromkeys(getattr(kind, "__annotations__", {}), Any)
        return hints
    return None


def _child(stored: Any, key: Any) -> Any:
    if isinstance(stored, Interpolation):
        return stored
    try:
        return stored[key]
    except (KeyError, IndexError, TypeError):
        return None
