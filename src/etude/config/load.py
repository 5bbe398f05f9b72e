"""Load a configuration: read, compose, override, interpolate, validate. Imports no torch."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.config.compose import compose, expand_components
from etude.config.dump import plain, show_value
from etude.config.interpolate import interpolate
from etude.config.origins import Layer, Origin, Problem, dotted, leaves, refuse
from etude.config.schema import ExperimentConfig
from etude.config.validate import KINDS, validate
from etude.registry import REGISTRIES


@dataclass(frozen=True, repr=False)
class Loaded:
    """A valid configuration, and where each of its values comes from."""

    path: str
    """The file it was loaded from."""
    config: ExperimentConfig
    """What is validated; holds the values of environment variables where the file names them."""
    raw: dict[str, Any]
    """What the files and overrides say, with `${env:NAME}` in place of values from the environment."""
    origins: dict[str, Origin]
    """Dotted path -> where the key was set."""
    _layer: Layer = field(compare=False)

    def __repr__(self) -> str:
        return f"Loaded({self.path!r})"

    def origin(self, path: str) -> Origin:
        """Return where a value comes from: a place in a file, an override, or the default."""
        keys = tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        return self._layer.origin(keys) if _is_given(self.raw, keys) else Origin()

    def stored(self) -> dict[str, Any]:
        """Return the whole configuration as plain values that load back to this one, without secrets."""
        return plain(self.config, self.raw)

    def explain(self) -> list[tuple[str, str, str]]:
        """Return (path, value, origin) of every value, those of defaults included."""
        rows = []
        for name, section in plain(self.config, self.raw, escaped=False).items():
            for path, value in leaves(section, (name,), whole_lists=True):
                origin = self._layer.origin(path) if _is_given(self.raw, path) else Origin()
                rows.append((dotted(path), show_value(value), str(origin)))
            rows += [(path, text, "default") for path, text in _left_to_defaults(self.config, name)]
        return rows


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Loaded:
    """Load and validate a configuration file; raise `ConfigError` with every mistake, one a line.

    Args:
        path: The file, or the name of a preset.
        overrides: `key=value` texts, such as `training.lr=1e-4`, applied in order after the files.
    """
    layer = compose(path, overrides)
    tree = interpolate(layer.values)
    problems: list[Problem] = tree.problems
    config: ExperimentConfig | None = None
    if not problems:
        for values in (tree.values, tree.stored):
            expand_components(values)
        config, problems = validate(tree)
    if config is None:
        raise refuse(problems, layer)
    origins = {dotted(where): origin for where, origin in layer.origins.items() if where}
    return Loaded(os.fspath(path), config, tree.stored, origins, layer)


def _is_given(tree: Any, path: Sequence[str | int]) -> bool:
    for key in path:
        if isinstance(tree, str):
            return True  # an interpolated mapping, written as one text
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True


def _left_to_defaults(config: ExperimentConfig, slot: str) -> list[tuple[str, str]]:
    """List the parameters that a configuration leaves to the defaults of its components."""
    if slot not in KINDS or getattr(config, slot) is None:
        return []
    part = getattr(config, slot)
    parts = [(f"{slot}.{i}", item) for i, item in enumerate(part)] if isinstance(part, list) else [(slot, part)]
    return [
        (f"{path}.params.{parameter.name}", _as_yaml(parameter.default))
        for path, component in parts
        for parameter in REGISTRIES[KINDS[slot]].signature(component.type).parameters
        if not parameter.required and parameter.name not in component.params
    ]


def _as_yaml(python: str) -> str:
    try:
        return show_value(ast.literal_eval(python))
    except (ValueError, SyntaxError):
        return python
