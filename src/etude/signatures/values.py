"""What a signature is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a component."""

    name: str
    type: str
    """The annotation as written; empty if there is none."""
    annotation: Any
    """The type that values are validated against; `Any` where the annotation is not understood."""
    default: str
    """The default as Python text; empty if the parameter is required."""
    required: bool
    help: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters that a component accepts by name."""

    parameters: tuple[Parameter, ...] = ()
    open: bool = False
    """Whether further names are accepted (`**kwargs`)."""
    summary: str = ""
    """The first line of the component's docstring."""

    def without(self, names: Iterable[str]) -> Signature:
        """Return the signature less the parameters that the framework supplies."""
        hidden = frozenset(names)
        return Signature(tuple(p for p in self.parameters if p.name not in hidden), self.open, self.summary)

    def get(self, name: str) -> Parameter | None:
        """Return one parameter by name."""
        return next((p for p in self.parameters if p.name == name), None)
