"""Plugins: modules and files of the user whose components register themselves when they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable

from etude.errors import RegistryError
from etude.registry import REGISTRIES

_PLUGIN_FILES: dict[str, str] = {}
"""Real path of every plugin that was loaded -> the name of its module."""


def is_plugin_file(plugin: str) -> bool:
    """Tell whether a plugin is named as a file rather than as a module."""
    return plugin.endswith(".py") or "/" in plugin or os.sep in plugin


def loaded_plugins() -> list[str]:
    """Name what `load_plugins` has loaded, in that order, so that another process can load the same."""
    return [path if name.startswith("etude_plugin_") else name for path, name in _PLUGIN_FILES.items()]


def load_plugins(modules: Iterable[str]) -> None:
    """Import each plugin once, by module name or by the path of a Python file; its components register themselves."""
    for plugin in modules:
        before = {name: dict(registry._entries) for name, registry in REGISTRIES.items()}
        try:
            _load_file(plugin) if is_plugin_file(plugin) else _load_module(plugin)
        # A plugin is the user's code and may raise anything: the error must name the plugin, and what it had
        # registered before must not stand in the way of the next attempt.
        except (Exception, SystemExit) as error:
            for name, registry in REGISTRIES.items():
                registry._entries = before[name]
            if isinstance(error, RegistryError):
                raise RegistryError(f"plugin {plugin!r}: {error}") from error
            raise RegistryError(f"plugin {plugin!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _load_module(name: str) -> None:
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None and os.getcwd() not in sys.path and "" not in sys.path:
        # `python -m` looks in the working directory, an installed command does not: plugins are found either way.
        sys.path.append(os.getcwd())
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"no module named {name!r} in the environment or the working directory")
    if spec.origin and os.path.realpath(spec.origin) in _PLUGIN_FILES:
        return
    importlib.import_module(name)
    if spec.origin:
        _PLUGIN_FILES[os.path.realpath(spec.origin)] = name


def _load_file(path: str) -> None:
    real = os.path.realpath(os.path.expanduser(path))
    if real in _PLUGIN_FILES:
        return
    if not os.path.isfile(real):
        raise FileNotFoundError("no such file")
    for module in list(sys.modules.values()):
        if os.path.realpath(getattr(module, "__file__", None) or "") == real:
            _PLUGIN_FILES[real] = module.__name__
            return
    name = "etude_plugin_" + os.path.splitext(os.path.basename(real))[0]
    while name in sys.modules:
        name += "_"
    # As a package of its folder, a file may import its siblings: `from .sibling import x`.
    spec = importlib.util.spec_from_file_location(name, real, submodule_search_locations=[os.path.dirname(real)])
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up while it is being imported
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    _PLUGIN_FILES[real] = name
