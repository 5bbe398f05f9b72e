"""What a parameter that holds further parameters says about them, so that a check can look inside.

Used as metadata of an annotation: `augment: Annotated[dict[str, Any], ParametersOf("etude.data.augment:Augment")]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class ParametersOf:
    """A mapping holds the parameters of one class or function."""

    target: str
    """`module:attribute`."""


@dataclass(frozen=True, slots=True)
class NamedParametersOf:
    """A mapping holds, by names of the user's, the parameters of one class or function each."""

    target: str
    """`module:attribute`."""


@dataclass(frozen=True, slots=True)
class ComponentOf:
    """A text or `{type, params}` names a component; what is neither is something else, and not looked into."""

    registry: str
    """The plural that the registry is known by."""


@dataclass(frozen=True, slots=True)
class OptionsOf:
    """A mapping holds the options of the environments that another parameter names."""

    parameter: str


Nested = ParametersOf | NamedParametersOf | ComponentOf | OptionsOf
MARKERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (ParametersOf, NamedParametersOf, ComponentOf, OptionsOf)
}


def find_nested(annotation: Any) -> Nested | None:
    """Return what an annotation says about the parameters inside, if it does."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        said = next((item for item in arguments[1:] if isinstance(item, Nested)), None)
        return said if said is not None else find_nested(arguments[0])
    if origin is Union or (origin is not None and getattr(origin, "__name__", "") == "UnionType"):
        return next((found for found in map(find_nested, arguments) if found is not None), None)
    return None
