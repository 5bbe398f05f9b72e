"""What one kind of configuration file knows of its own; everything else is the same for all kinds."""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from etude.reading.check import check_model
from etude.reading.interpolate import Interpolated
from etude.reading.origins import Layer, Problem
from etude.reading.plain import overlay

C = TypeVar("C", bound=BaseModel)


class Dialect(Generic[C]):
    """A kind of file: the schema is enough; each method is a stage of reading that a kind may do its own way."""

    def __init__(self, schema: type[C]) -> None:
        self.schema = schema

    def locate(self, name: str, folder: str = "", named_at: str = "") -> str:
        """Return the file that a name means, on the command line or among `defaults`.

        Args:
            name: What was written.
            folder: Where files are looked for; the working directory unless given.
            named_at: Where it was written, at the head of errors.
        """
        return os.path.join(folder, name)

    def nearest(self, path: str) -> str:
        """Return `; did you mean 'x'?` for the file that a missing one may have been meant for, or nothing."""
        folder, name = os.path.split(path)
        for close in get_close_matches(name, files_in(folder), n=1, cutoff=0.6):
            return f"; did you mean {os.path.join(folder, close)!r}?"
        return ""

    def normalize(self, layer: Layer, folder: str) -> Layer:
        """Write out the short forms of one file, or of one override with an empty folder; paths are the folder's."""
        return layer

    def complete(self, layer: Layer) -> None:
        """Write out defaults that overrides must be able to reach into."""

    def translate(self, layer: Layer, tree: Interpolated) -> tuple[Layer, Interpolated]:
        """Put a file in the words of another kind, once it is composed and interpolated; see `Translation`."""
        return layer, tree

    def validate(self, tree: Interpolated) -> tuple[C | None, list[Problem]]:
        """Return the configuration, or everything that is wrong with it."""
        config, problems = check_model(self.schema, tree)
        return (None if problems else config), problems

    def plain(self, config: C, raw: dict[str, Any]) -> dict[str, Any]:
        """Return every setting as it is to be stored: the defaults of the schema with what was given over them."""
        stored: dict[str, Any] = overlay(config.model_dump(mode="json"), raw)
        return stored

    def left_to_defaults(self, config: C, section: str) -> list[tuple[str, str]]:
        """Return path and value of what a section leaves to defaults that the schema does not know."""
        return []


def files_in(folder: str) -> list[str]:
    """Name the YAML files of a folder."""
    try:
        return sorted(name for name in os.listdir(folder or ".") if name.endswith((".yaml", ".yml")))
    except OSError:
        return []
