"""Compose a configuration: the files it builds on, its own keys, then the overrides of the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from etude.config import yaml12
from etude.config.origins import DEFAULT, Layer, Origin
from etude.config.presets import locate, nearest
from etude.config.yaml12 import Path, ReadError
from etude.errors import ConfigError
from etude.registry import is_plugin_file
from etude.secrets import redact

COMPONENTS = ("policy", "data", "eval_data", "algorithm", "loss", "trainer", "engine")
COMPONENT_LISTS = ("loggers", "callbacks")


def compose(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Layer:
    """Read a file or preset with all it builds on, and apply overrides; nothing is interpolated or validated yet."""
    if "\0" in os.fspath(path):
        raise ConfigError(f"no such file: {os.fspath(path)!r}")
    layer = _Composer().file(locate(os.fspath(path)), "")
    _fill_in(layer)
    for text in overrides:
        _override(layer, text)
        _fill_in(layer)
    return layer


class _Composer:
    """Reads each file once; a file that several others build on is not composed anew for each."""

    def __init__(self) -> None:
        self.done: dict[str, Layer] = {}
        self.under_way: list[str] = []

    def file(self, path: str, named_at: str) -> Layer:
        real = os.path.realpath(os.path.expanduser(path))
        if real in self.under_way:
            cycle = " -> ".join(map(os.path.basename, [*self.under_way[self.under_way.index(real) :], real]))
            raise ConfigError(f"{named_at}defaults go round in a circle: {cycle}; remove one of them")
        if real not in self.done:
            if len(self.under_way) >= yaml12.MAX_DEPTH:
                raise ConfigError(f"{named_at}defaults nested more than {yaml12.MAX_DEPTH} files deep")
            self.under_way.append(real)
            self.done[real] = self._compose(path, named_at)
            self.under_way.pop()
        return self.done[real]

    def _compose(self, path: str, named_at: str) -> Layer:
        own = _read_file(path, named_at)
        if "defaults" not in own.values:
            return own
        layers = []
        entries = own.values.pop("defaults")
        at = own.origin(("defaults",))
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            origin = own.origin(("defaults", index))
            if isinstance(entry, dict) and len(entry) == 1:
                entry = next(iter(entry.values()))
            if not isinstance(entries, list) or not isinstance(entry, str) or not entry or "\0" in entry:
                place = origin if isinstance(entries, list) else at
                raise ConfigError(f"{place}: defaults: must be a list of file names, or of {{label: file name}}")
            if "${" in entry:
                raise ConfigError(f"{origin}: defaults: ${{...}} is not available here; write the file name")
            base = os.path.normpath(locate(os.path.expanduser(entry), os.path.dirname(path), f"{origin}: "))
            layers.append(self.file(base, f"{origin}: "))
        return _merge([*layers, own])


def _read_file(path: str, named_at: str) -> Layer:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(yaml12.MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{named_at}no such file: {path}{nearest(path)}") from None
    except OSError as error:
        raise ConfigError(f"{named_at}cannot read {path}: {error.strerror}") from None
    try:
        document = yaml12.read(yaml12.read_bytes(data))
    except ReadError as error:
        raise yaml12.as_config_error(error, path) from None
    values = {} if document.value is None else document.value
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1:1: a configuration is a mapping of keys to values, not {_kind(values)}")
    origins = {where: Origin(path, *mark) for where, mark in document.marks.items()}
    layer = Layer(values, {(): Origin(path, 1, 1), **origins})
    expand_components(layer.values)
    _locate_plugins(layer.values, os.path.dirname(path))
    return layer


def expand_components(values: dict[str, Any]) -> None:
    """Write components given by name only as mappings: `engine: torch` means `engine: {type: torch}`."""
    for slot in COMPONENTS:
        values.update({slot: _expand(values[slot])} if slot in values else {})
    for slot in COMPONENT_LISTS:
        if isinstance(values.get(slot), list):
            values[slot] = [_expand(item) for item in values[slot]]


def _expand(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) and "${" not in value else value


def _locate_plugins(values: dict[str, Any], directory: str) -> None:
    """Make the paths of plugin files absolute; they are written relative to the file that lists them."""
    plugins = values.get("plugins")
    if isinstance(plugins, list):
        values["plugins"] = [_locate(plugin, directory) for plugin in plugins]


def _locate(plugin: Any, directory: str) -> Any:
    if not isinstance(plugin, str) or not is_plugin_file(plugin) or "${" in plugin or "\0" in plugin:
        return plugin
    return os.path.abspath(os.path.join(directory, os.path.expanduser(plugin)))


def _merge(layers: list[Layer]) -> Layer:
    """Merge from left to right: mappings deeply, everything else replaced.

    OmegaConf merges the shape; the values stay outside, so that it neither resolves an interpolation early nor gives a
    meaning to text such as `???`.
    """
    if len(layers) == 1:
        return layers[0]
    from omegaconf import OmegaConf

    held: list[Any] = []

    def hold(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hold(item) for key, item in value.items()}
        held.append(value)
        return len(held) - 1

    def release(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: release(item) for key, item in value.items()}
        return held[value]

    merged = OmegaConf.unsafe_merge(*(OmegaConf.create(hold(layer.values)) for layer in layers))
    origins: dict[Path, Origin] = {}
    for layer in layers:
        origins.update(layer.origins)
    return Layer(release(OmegaConf.to_container(merged)), origins)


# ---- overrides -------------------------------------------------------------------------------------------------------


def _override(layer: Layer, text: str) -> None:
    """Apply one `key=value`; the value is YAML, the key a dotted path in which numbers index lists."""
    origin = Origin(override=redact(text))
    key, equals, written = text.partition("=")
    path: Path = tuple(re.sub(r"\[(\d+)\]", r".\1", key.strip()).split("."))
    if not equals or not all(path):
        raise ConfigError(f"{origin}: write key=value, such as training.lr=1e-4")
    if key[0] in "+~":
        raise ConfigError(f"{origin}: there is no '{key[0]}'; name a key of the schema, and remove a value with =null")
    try:
        value = yaml12.read(written).value
    except ReadError as error:
        raise ConfigError(f"{origin}: {error.message}; quote text that has a meaning in YAML") from None
    if path == ("defaults",):
        raise ConfigError(f"{origin}: defaults belong in the file")
    if path[0] == "plugins":
        value = [_locate(item, "") for item in value] if isinstance(value, list) else _locate(value, "")
    _set(layer, path, value, origin)
    expand_components(layer.values)


def _set(layer: Layer, path: Path, value: Any, origin: Origin) -> None:
    container: Any = layer.values
    where: list[str | int] = []
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(container, list):
            name = ".".join(map(str, where))
            if not isinstance(part, str) or not part.isdecimal() or int(part) >= len(container):
                size = f"{len(container)} entries" if len(container) != 1 else "1 entry"
                raise ConfigError(f"{origin}: {name} is a list of {size}; {part!r} is none of them (they count from 0)")
            part = int(part)
        elif not isinstance(container, dict):
            name = ".".join(map(str, where))
            raise ConfigError(f"{origin}: {name} is {_kind(container)}, it has no {part!r}")
        where.append(part)
        if last:
            container[part] = value
        elif isinstance(container, dict) and container.get(part) is None:
            container[part] = {}
            layer.origins[tuple(where)] = origin
        container = container[part]
    stale = tuple(where)
    for known in [p for p in layer.origins if p[: len(stale)] == stale]:
        del layer.origins[known]
    layer.origins[stale] = origin


def _fill_in(layer: Layer) -> None:
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


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names[type(value)]
