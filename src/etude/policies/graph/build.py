"""From a file to a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from etude.policies.graph.components import run_imports
from etude.policies.graph.interpolate import References
from etude.policies.graph.merge import Templates
from etude.policies.graph.model import GraphModel, make_plan
from etude.policies.graph.objects import Maker
from etude.policies.graph.schema import GraphSettings, check_top, parse, refuse_strays
from etude.policies.graph.shapes import try_shapes
from etude.policies.graph.source import read_source
from etude.policies.graph.tree import Item


def build_model(
    source: str | os.PathLike[str] | Mapping[str, Any], *, allow_imports: bool = True, allow_target: bool = False
) -> GraphModel:
    """Build the model that a YAML file, or a dictionary of the same form, describes.

    Weights are drawn from torch's global generator, module by module in the order they are listed. Where all inputs are
    declared with shapes, the model is tried on the meta device.

    Args:
        source: Path of the file, or the dictionary.
        allow_imports: Let the file import modules that register components of their own.
        allow_target: Let the file name any Python object with `_target_`; only for files you trust like code.
    """
    root, settings = resolve(source)
    if "imports" in root.value:
        run_imports(root.value["imports"], settings, allowed=allow_imports)
    graph = parse(root.value["model"])
    maker = Maker(settings, allow_target=allow_target)
    modules: dict[str, nn.Module] = {}
    for name, item in graph.modules.items():
        _check_name(name, item)
        modules[name] = maker.module(name, item)
    model = GraphModel(modules, make_plan(graph, modules, strict=settings.strict))
    try_shapes(model)
    return model


def plain_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's description as one dictionary: without other files, templates and references."""
    root, _ = resolve(source)
    kept = ("schema_version", "settings", "imports", "model")
    return {key: root.value[key].plain() for key in kept if key in root.value}


def resolve(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Item, GraphSettings]:
    """Read, merge, expand and interpolate; nothing is made yet."""
    root = read_source(source)
    check_top(root)
    items = dict(root.value)
    templates = items.pop("templates", None)
    expanded = Templates(templates.mapping("templates") if templates else {}).expand(Item(items, root.place))
    interpolation = References(expanded)
    resolved = interpolation.resolve()
    refuse_strays(resolved, interpolation.named)
    return resolved, check_top(resolved)


def _check_name(name: str, item: Item) -> None:
    # nn.ModuleDict keeps modules as attributes beside its own.
    if hasattr(nn.ModuleDict, name) or name == "training":
        raise item.place.error(f"a module cannot be called {name!r}; choose another name")
