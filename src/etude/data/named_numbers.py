"""The numbers of a dataset by the names that it gives them, with * and ? as in file names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean
from etude.types import DataSpec

Place = tuple[str, int]
"""A feature, and which of its numbers."""


class NamedNumbers:
    """Find numbers by name: `hand_x`, `hand_?`, `observation.state.hand_x`, or `observation.state.0`.

    Args:
        spec: The features, with the names of their numbers.
        roles: Roles of the features that are looked into.
    """

    def __init__(self, spec: DataSpec, roles: Collection[str] = ("state", "environment")) -> None:
        self.places: dict[str, list[Place]] = {}
        """Where each name is found; a short name may be found in several features."""
        for feature, what in spec.features.items():
            if what.role not in roles or len(what.shape) != 1:
                continue
            names = what.names if what.names is not None and len(what.names) == what.shape[0] else None
            for index in range(what.shape[0]):
                named = () if names is None else (names[index], f"{feature}.{names[index]}")
                for name in dict.fromkeys([*named, f"{feature}.{index}"]):
                    self.places.setdefault(name, []).append((feature, index))

    def find(self, where: str, names: Any) -> list[Place]:
        """Return feature and index of each number that is named, in the order of the names and of the data.

        Args:
            where: Who names them, for messages.
            names: A name or a list of names, each with or without * and ?.
        """
        listed = [names] if isinstance(names, str) else names
        if not isinstance(listed, Iterable) or not listed or not all(isinstance(name, str) for name in listed):
            raise ConfigError(f"{where} takes names of numbers, such as hand_x, got {names!r}")
        return [place for name in listed for place in self._find(where, name)]

    def _find(self, where: str, name: str) -> list[Place]:
        matching = [name] if name in self.places else [known for known in self.places if fnmatchcase(known, name)]
        if not matching:
            short = list(dict.fromkeys(known for known in self.places if "." not in known)) or list(self.places)
            shown = f"{', '.join(short[:12])}{', ...' if len(short) > 12 else ''}" if short else "none with a name"
            raise ConfigError(
                f"{where} names {name!r}, which is no number of the data (there are {shown})"
                f"{did_you_mean(name, self.places)}"
            )
        for known in matching:
            if len(self.places[known]) > 1:
                whole = " or ".join(f"{feature}.{index}" for feature, index in self.places[known])
                raise ConfigError(f"{where} names {known!r}, which several features have; say {whole}")
        # A pattern may find one number by two of its names.
        return list(dict.fromkeys(self.places[known][0] for known in matching))
