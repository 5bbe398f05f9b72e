"""Load an experiment: the dialect that knows its components and presets. Imports no torch."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from typing import Any

from etude.config.component_file import is_component_file, locate_components, translate_component_file
from etude.config.components import KINDS, expand_components, fill_in, locate_plugins
from etude.config.dump import plain
from etude.config.presets import locate, nearest_preset
from etude.config.recipe_file import is_recipe, translate_recipe
from etude.config.schema import ExperimentConfig
from etude.config.validate import validate
from etude.errors import ConfigError
from etude.reading import load as reading
from etude.reading.dialect import Dialect
from etude.reading.interpolate import Interpolated
from etude.reading.origins import Layer, Problem
from etude.reading.plain import show_value
from etude.registry import REGISTRIES

Loaded = reading.Loaded[ExperimentConfig]


class ExperimentFile(Dialect[ExperimentConfig]):
    """What `etude train` reads: components from the registries, presets by name.

    Args:
        mode: How a recipe is to be trained, if the command line says so: self-hosted or training-service.
    """

    def __init__(self, mode: str | None = None) -> None:
        super().__init__(ExperimentConfig)
        self.mode = mode

    def locate(self, name: str, folder: str = "", named_at: str = "") -> str:
        """Return the file or preset that a name means."""
        return locate(name, folder, named_at)

    def nearest(self, path: str) -> str:
        """Return the file or preset that a missing file may have been meant for."""
        return super().nearest(path) or nearest_preset(path)

    def normalize(self, layer: Layer, folder: str) -> Layer:
        """Write out components given by name only, and the paths of plugins."""
        expand_components(layer.values)
        locate_plugins(layer.values, folder)
        return layer

    def complete(self, layer: Layer) -> None:
        """Write out the components that have a default."""
        fill_in(layer)

    def translate(self, layer: Layer, tree: Interpolated) -> tuple[Layer, Interpolated]:
        """Put a recipe, or a file of models made of components, in the words of every other."""
        if is_recipe(tree.values):
            return translate_recipe(layer, tree, self.mode)
        if self.mode is not None:
            raise ConfigError(
                f"{layer.origin(()).file}: -m {self.mode} is for recipes, which this is not; leave it out"
            )
        if is_component_file(tree.values):
            return translate_component_file(layer, tree)
        locate_components(layer, tree)
        return layer, tree

    def validate(self, tree: Interpolated) -> tuple[ExperimentConfig | None, list[Problem]]:
        """Check sections against the schema and components against their registries."""
        for values in (tree.values, tree.stored):
            expand_components(values)  # those that an interpolation named
        return validate(tree)

    def plain(self, config: ExperimentConfig, raw: dict[str, Any]) -> dict[str, Any]:
        """Return every setting as it is stored; components stay as they were written."""
        return plain(config, raw)

    def left_to_defaults(self, config: ExperimentConfig, section: str) -> list[tuple[str, str]]:
        """List the parameters that a configuration leaves to the defaults of its components."""
        part = getattr(config, section) if section in KINDS else None
        if part is None:
            return []
        parts = [(f"{section}.{i}", p) for i, p in enumerate(part)] if isinstance(part, list) else [(section, part)]
        return [
            (f"{path}.params.{parameter.name}", _as_yaml(parameter.default))
            for path, component in parts
            for parameter in REGISTRIES[KINDS[section]].signature(component.type).parameters
            if not parameter.required and parameter.name not in component.params
        ]


EXPERIMENT = ExperimentFile()


def load(path: str | os.PathLike[str], overrides: Sequence[str] = (), mode: str | None = None) -> Loaded:
    """Load and validate an experiment file, recipe or preset; raise `ConfigError` with every mistake, one a line.

    Args:
        path: The file, or the name of a preset.
        overrides: `key=value` texts, such as `training.lr=1e-4`, applied in order after the files.
        mode: How a recipe must be trained: self-hosted or training-service; None takes it from the recipe.
    """
    return reading.load(path, overrides, EXPERIMENT if mode is None else ExperimentFile(mode))


def _as_yaml(python: str) -> str:
    try:
        return show_value(ast.literal_eval(python))
    except (ValueError, SyntaxError):
        return python
