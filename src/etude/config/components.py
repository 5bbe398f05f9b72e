"""Where a configuration names components, and how they are written short: `engine: torch`."""

from __future__ import annotations

import os
from typing import Any

from etude.plugins import is_plugin_file
from etude.reading.origins import DEFAULT, Layer

KINDS = {
    "policy": "policies", "data": "data", "eval_data": "data", "algorithm": "algorithms", "loss": "losses",
    "trainer": "trainers", "engine": "engines", "loggers": "loggers", "callbacks": "callbacks",
}  # fmt: skip
"""The registry of each key that holds components."""
COMPONENT_LISTS = ("loggers", "callbacks")
COMPONENTS = tuple(key for key in KINDS if key not in COMPONENT_LISTS)


def expand_components(values: dict[str, Any]) -> None:
    """Write components given by name only as mappings: `engine: torch` means `engine: {type: torch}`."""
    for slot in COMPONENTS:
        values.update({slot: _expand(values[slot])} if slot in values else {})
    for slot in COMPONENT_LISTS:
        if isinstance(values.get(slot), list):
            values[slot] = [_expand(item) for item in values[slot]]


def _expand(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) and "${" not in value else value


def locate_plugins(values: dict[str, Any], folder: str) -> None:
    """Make the paths of plugin files absolute; they are written relative to the file that lists them."""
    plugins = values.get("plugins")
    if isinstance(plugins, list):
        values["plugins"] = [_locate(plugin, folder) for plugin in plugins]


def _locate(plugin: Any, folder: str) -> Any:
    if not isinstance(plugin, str) or not is_plugin_file(plugin) or "${" in plugin or "\0" in plugin:
        return plugin
    return os.path.abspath(os.path.join(folder, os.path.expanduser(plugin)))


def fill_in(layer: Layer) -> None:
    """Write out the components that have a default, so that overrides can reach into them."""
    written: dict[str, Any] = {"engine": {}, "loggers": [{"type": "tensorboard"}], "callbacks": [], "plugins": []}
    for key, value in written.items():
        if key not in layer.values:
            layer.values[key] = value
            layer.origins[(key,)] = DEFAULT
    engine = layer.values["engine"]
    if isinstance(engine, dict) and "type" not in engine:
        layer.values["engine"] = {"type": "torch", **engine}
        layer.origins[("engine", "type")] = DEFAULT
