"""Make what a file describes: mappings with `_type_` or `_target_` become objects, all others stay as they are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from etude.errors import ConfigError
from etude.policies.graph.components import find_component
from etude.policies.graph.schema import GraphSettings
from etude.policies.graph.tree import Item, WrittenAt
from etude.reading.suggest import did_you_mean

_RESERVED = ("_type_", "_target_", "_args_", "_kwargs_")


class Maker:
    """Makes modules and the objects they are given.

    Args:
        settings: What the file allows itself.
        allow_target: Whether the caller lets a file name any code to call.
    """

    def __init__(self, settings: GraphSettings, *, allow_target: bool) -> None:
        self.settings, self.allow_target = settings, allow_target

    def module(self, name: str, item: Item) -> nn.Module:
        """Return the module that an item describes."""
        spec = item.mapping(f"the module {name!r}")
        if "_type_" not in spec and "_target_" not in spec:
            stray = next((key for key in spec if did_you_mean(key, _RESERVED)), None)
            near = did_you_mean(stray, _RESERVED) if stray else ""
            raise (spec[stray] if stray else item).place.error(f"the module {name!r} has no _type_{near}")
        made = self.value(item, f"module {name!r}: ")
        if not isinstance(made, nn.Module):
            raise item.place.error(f"the module {name!r} is a {type(made).__name__}, not a torch.nn.Module")
        return made

    def value(self, item: Item, label: str = "") -> Any:
        """Return a value with everything inside it made."""
        if isinstance(item.value, list):
            return [self.value(inner, label) for inner in item.value]
        if not isinstance(item.value, dict):
            return literal(item.value)
        if "_type_" in item.value or "_target_" in item.value:
            return self._object(item, label)
        for key, inner in item.value.items():
            if key.startswith("_") and key.endswith("_") and len(key) > 1:
                raise inner.place.error(f"unknown key{did_you_mean(key, _RESERVED)}")
        return {key: self.value(inner, label) for key, inner in item.value.items()}

    def _object(self, item: Item, label: str) -> Any:
        spec = item.value
        if "_type_" in spec and "_target_" in spec:
            raise item.place.error("write either _type_ or _target_")
        named = spec.get("_type_") or spec["_target_"]
        build = find_component(named) if "_type_" in spec else self._target(named)
        given = {key: inner for key, inner in spec.items() if key not in _RESERVED}
        for key, inner in given.items():
            if key.startswith("_") and key.endswith("_"):
                raise inner.place.error(f"unknown key{did_you_mean(key, _RESERVED)}")
        for key, inner in spec["_kwargs_"].mapping("_kwargs_").items() if "_kwargs_" in spec else ():
            if key in given:
                raise inner.place.error(f"{key!r} is given twice")
            given[key] = inner
        listed = spec["_args_"].listed("_args_") if "_args_" in spec else []
        args = [self.value(inner, label) for inner in listed]
        kwargs = {key: self.value(inner, label) for key, inner in given.items()}
        if self.settings.strict:
            places = {key: inner.place for key, inner in given.items()}
            check_call(build, args, kwargs, item.place, places, f"{label}{named.value}")
        try:
            return build(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a component may raise anything; its type stays
            raise placed(error, f"{item.place}: {label}{named.value}") from error.__cause__

    def _target(self, item: Item) -> Callable[..., Any]:
        name = item.text("_target_")
        if not self.allow_target:
            raise item.place.error(
                "_target_ calls any code that a file names; build_model(..., allow_target=True) allows it"
            )
        if not self.settings.allow_target:
            raise item.place.error("_target_ is not allowed by settings.allow_target")
        module, _, attribute = name.replace(":", ".").rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise placed(error, f"{item.place}: cannot import {name[:80]!r}") from None
        if not callable(found):
            raise item.place.error(f"{name[:80]!r} cannot be called")
        return found  # type: ignore[no-any-return]


def literal(value: Any) -> Any:
    """Return a plain value as it is meant: `$${` in text stands for `${`."""
    return value.replace("$${", "${") if isinstance(value, str) else value


def check_call(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], place: WrittenAt,
    places: dict[str, WrittenAt], what: str,
) -> None:  # fmt: skip
    """Refuse arguments that a function does not take, before it is called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C do not tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        names = [
            name for name, one in signature.parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        ]
        for key in kwargs if not takes_any else ():
            if key not in names:
                near = did_you_mean(key, names) or f"; known: {', '.join(names) or 'none'}"
                raise places[key].error(f"{what} has no parameter {key[:80]!r}{near}") from None
        raise place.error(f"{what}: {error}") from None


def placed(error: Exception, where: str, *, briefly: bool = True) -> Exception:
    """Return the same error with the place in front of what it says; its type stays, and so does all else it holds.

    Args:
        error: What was raised.
        where: The place.
        briefly: Put what it says in one line, without the frames that torch adds to errors of its C++ half.
    """
    if len(error.args) == 1 and isinstance(error.args[0], str):
        said = error.args[0]
        if briefly:
            said = " ".join(said.partition("Exception raised from")[0].split())[:400]
        error.args = (f"{where}: {said}",)
    elif not error.args and not isinstance(error, ConfigError):
        error.args = (where,)
    if where not in str(error):
        error.add_note(where)
    return error
