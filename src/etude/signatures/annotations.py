"""Turn annotations, written or live, into types that values from a configuration can be validated against."""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from etude.signatures.nested import MARKERS, find_nested

Lookup = Callable[[str], Any]
"""What a name stands for: an object, a pair (syntax tree, lookup) for an alias, or None if unknown."""

_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set, frozenset)},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union", "Annotated")},
    "None": None,
    "object": Any,
}
_PLAIN = frozenset({int, float, str, bool, list, dict, tuple, set, frozenset, type(None), Path})
_AS_LIST = frozenset({collections.abc.Iterable, collections.abc.Collection, collections.abc.Sequence, list})
_AS_DICT = frozenset({collections.abc.Mapping, collections.abc.MutableMapping, dict})
# No configuration can hold one, so in a union the other members decide.
_UNWRITABLE = frozenset({"Tensor", "torch.Tensor", "nn.Module", "torch.nn.Module", "torch.device", "torch.dtype"})


class _Unwritable:
    """Stands for a type that cannot be written in a configuration file."""


def interpret(node: ast.expr, lookup: Lookup) -> Any:
    """Return the type that an annotation stands for; `Any` for what is not understood. Evaluates nothing."""
    found = _interpret(node, lookup)
    return Any if found is _Unwritable else found


def _interpret(node: ast.expr, lookup: Lookup) -> Any:
    if isinstance(node, ast.Constant):
        if node.value is None:
            return None
        if not isinstance(node.value, str):
            return Any
        try:
            return _interpret(ast.parse(node.value, mode="eval").body, lookup)
        except SyntaxError:
            return Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_interpret(node.left, lookup), _interpret(node.right, lookup)])
    if isinstance(node, ast.Subscript):
        return _subscript(node, lookup)
    if isinstance(node, ast.Name | ast.Attribute):
        return _name(ast.unparse(node), lookup)
    return Any


def _name(name: str, lookup: Lookup) -> Any:
    value = lookup(name)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], ast.expr):
        return _interpret(value[0], value[1])
    if value is None:
        value = _NAMES.get(name, _Unwritable if name in _UNWRITABLE else Any)
    return understood(value, lookup)


def _subscript(node: ast.Subscript, lookup: Lookup) -> Any:
    name = ast.unparse(node.value)
    known = lookup(name)
    origin = _NAMES.get(name) if known is None or isinstance(known, tuple) else known
    items = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if origin is Literal:
        values = tuple(item.value for item in items if isinstance(item, ast.Constant))
        return Literal[values] if len(values) == len(items) else Any
    if origin is Annotated:
        return _annotated(items, lookup)
    if origin is tuple:
        many = len(items) == 2 and isinstance(items[1], ast.Constant) and items[1].value is Ellipsis
        kinds = [interpret(item, lookup) for item in (items[:1] if many else items)]
        return _generic(tuple, [*kinds, ...] if many else kinds)
    kinds = [_interpret(item, lookup) for item in items]
    if origin is typing.Optional:
        return _union([*kinds, None])
    if origin is Union:
        return _union(kinds)
    return _generic(origin, [Any if kind is _Unwritable else kind for kind in kinds])


def _annotated(items: list[ast.expr], lookup: Lookup) -> Any:
    kind = interpret(items[0], lookup)
    for item in items[1:]:
        if isinstance(item, ast.Call) and ast.unparse(item.func) in ("Field", "pydantic.Field") and not item.args:
            from pydantic import Field

            try:
                options = {k.arg or "": ast.literal_eval(k.value) for k in item.keywords}
            except ValueError:
                continue
            kind = Annotated[kind, Field(**options)]
        elif isinstance(item, ast.Call) and ast.unparse(item.func) in MARKERS:
            said = [value.value for value in item.args if isinstance(value, ast.Constant)]
            kind = Annotated[kind, MARKERS[ast.unparse(item.func)](*said)]
    return kind


def _union(kinds: list[Any]) -> Any:
    written = [kind for kind in kinds if kind is not _Unwritable]
    if not written:
        return _Unwritable
    if any(kind is Any for kind in written):
        return next((kind for kind in written if find_nested(kind) is not None), Any)
    return Union[tuple(written)]  # noqa: UP007 (made, not written)


def _generic(origin: Any, kinds: list[Any]) -> Any:
    if origin is tuple and len(kinds) > 0:
        return types.GenericAlias(tuple, tuple(kinds))
    if origin in (set, frozenset) and len(kinds) == 1:
        return origin[kinds[0]]
    # pydantic reads an Iterable lazily; a configuration wants its mistakes found now.
    if origin in _AS_LIST and len(kinds) == 1:
        return types.GenericAlias(list, (kinds[0],))
    if origin in _AS_DICT and len(kinds) == 2:
        return types.GenericAlias(dict, (kinds[0], kinds[1]))
    return Any


def understood(annotation: Any, lookup: Lookup = lambda name: None) -> Any:
    """Return a live annotation in the terms we validate against; `Any` for what is not understood."""
    if isinstance(annotation, str):
        try:
            return interpret(ast.parse(annotation, mode="eval").body, lookup)
        except SyntaxError:
            return Any
    origin = get_origin(annotation)
    if origin is Annotated:
        inner = understood(get_args(annotation)[0], lookup)
        return Any if inner is Any and find_nested(annotation) is None else annotation
    if origin is Literal:
        return annotation
    if origin in (Union, types.UnionType):
        return _union([_Unwritable if _unwritable(a) else understood(a, lookup) for a in get_args(annotation)])
    if origin is not None:
        return _generic(origin, [a if a is ... else understood(a, lookup) for a in get_args(annotation)])
    return _plain(annotation)


def _unwritable(annotation: Any) -> bool:
    return getattr(annotation, "__module__", "").partition(".")[0] == "torch"


def _plain(annotation: Any) -> Any:
    if annotation is None or annotation in (Any, _Unwritable, Literal, Annotated):
        return annotation
    if not inspect.isclass(annotation):
        return Any
    if annotation in _AS_LIST:
        return list
    if annotation in _AS_DICT:
        return dict
    if annotation.__module__ == "etude.types.duration" and annotation.__name__ == "Duration":
        from etude.config.training import DurationField

        return DurationField
    if annotation in _PLAIN or annotation.__name__ in ("SecretStr", "SecretBytes"):
        return annotation
    structured = dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation)
    modelled = hasattr(annotation, "model_fields") and hasattr(annotation, "model_validate")
    return annotation if structured or modelled or issubclass(annotation, enum.Enum) else Any
