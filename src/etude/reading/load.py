"""Load a configuration: read, compose, override, interpolate, translate, validate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from etude.reading.compose import compose
from etude.reading.dialect import C, Dialect
from etude.reading.interpolate import interpolate
from etude.reading.origins import Layer, Origin, dotted, leaves, refuse
from etude.reading.plain import clean, show_value


@dataclass(frozen=True, repr=False)
class Loaded(Generic[C]):
    """A valid configuration, and where each of its values comes from."""

    path: str
    """The file it was loaded from."""
    config: C
    """What is validated; holds the values of environment variables where the file names them."""
    raw: dict[str, Any]
    """What the files and overrides say, with `${env:NAME}` in place of values from the environment."""
    origins: dict[str, Origin]
    """Dotted path -> where the key was set."""
    _layer: Layer = field(compare=False)
    _dialect: Dialect[C] = field(compare=False)

    def __repr__(self) -> str:
        return f"Loaded({self.path!r})"

    def origin(self, path: str) -> Origin:
        """Return where a value comes from: a place in a file, an override, or the default."""
        keys = tuple(int(part) if part.isdecimal() else part for part in path.split("."))
        return self._layer.origin(keys) if _is_given(self.raw, keys) else Origin()

    def stored(self) -> dict[str, Any]:
        """Return the whole configuration as plain values that load back to this one, without secrets."""
        values: dict[str, Any] = clean(self._dialect.plain(self.config, self.raw))
        return values

    def explain(self) -> list[tuple[str, str, str]]:
        """Return (path, value, origin) of every value, those of defaults included."""
        rows = []
        for name, section in clean(self._dialect.plain(self.config, self.raw), escaped=False).items():
            for path, value in leaves(section, (name,), whole_lists=True):
                origin = self._layer.origin(path) if _is_given(self.raw, path) else Origin()
                rows.append((dotted(path), show_value(value), str(origin)))
            rows += [(path, text, "default") for path, text in self._dialect.left_to_defaults(self.config, name)]
        return rows


def load(path: str | os.PathLike[str] | None, overrides: Sequence[str], dialect: Dialect[C]) -> Loaded[C]:
    """Load and validate a configuration file; raise `ConfigError` with every mistake, one a line.

    Args:
        path: The file, or what the dialect finds by that name; None begins with nothing but defaults.
        overrides: `key=value` texts, such as `training.lr=1e-4`, applied in order after the files.
        dialect: What kind of file it is.
    """
    layer = compose(path, overrides, dialect)
    tree = interpolate(layer.values)
    config, problems = None, tree.problems
    if not problems:
        layer, tree = dialect.translate(layer, tree)
        config, problems = (None, tree.problems) if tree.problems else dialect.validate(tree)
    if config is None:
        raise refuse(problems, layer)
    origins = {dotted(where): origin for where, origin in layer.origins.items() if where}
    return Loaded("" if path is None else os.fspath(path), config, tree.stored, origins, layer, dialect)


def _is_given(tree: Any, path: Sequence[str | int]) -> bool:
    for key in path:
        if isinstance(tree, str):
            return True  # an interpolated mapping, written as one text
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
