"""Importing plugins: modules by their name, files by their path, each once however it is named."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from importlib.machinery import ModuleSpec

PLUGIN_FILES: dict[str, str] = {}
"""Real path of every plugin that was loaded -> the name of its module."""
_PREFIX = "etude_plugin_"


def is_plugin_file(plugin: str) -> bool:
    """Tell whether a plugin is named as a file rather than as a module."""
    return plugin.endswith(".py") or "/" in plugin or os.sep in plugin


def loaded_plugins() -> list[str]:
    """Name what has been imported, in that order, so that another process can import the same."""
    return [path if name.startswith(_PREFIX) else name for path, name in PLUGIN_FILES.items()]


def import_plugin(plugin: str) -> None:
    """Import a plugin by module name, or by the path of a Python file."""
    _import_file(plugin) if is_plugin_file(plugin) else _import_module(plugin)


def _import_module(name: str) -> None:
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
    if spec.origin and os.path.realpath(spec.origin) in PLUGIN_FILES:
        return
    importlib.import_module(name)
    if spec.origin:
        PLUGIN_FILES[os.path.realpath(spec.origin)] = name


def _import_file(path: str) -> None:
    real = os.path.realpath(os.path.expanduser(path))
    if real in PLUGIN_FILES:
        return
    if not os.path.isfile(real):
        raise FileNotFoundError("no such file")
    for module in list(sys.modules.values()):
        if os.path.realpath(getattr(module, "__file__", None) or "") == real:
            PLUGIN_FILES[real] = module.__name__
            return
    before = set(sys.modules)
    package = _package_of(os.path.dirname(real))
    name = f"{package}.{os.path.splitext(os.path.basename(real))[0]}"
    spec = importlib.util.spec_from_file_location(name, real)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up while it is being imported
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in set(sys.modules) - before:
            if loaded.startswith(_PREFIX):
                del sys.modules[loaded]
        raise
    PLUGIN_FILES[real] = name


def _package_of(folder: str) -> str:
    """Return the package that the files of a folder are modules of: they import each other, and share what they import.

    One package for each file would import a sibling anew for each plugin, and make two classes of one.
    """
    name = _PREFIX + re.sub(r"\W", "_", os.path.basename(folder))
    while name in sys.modules and list(sys.modules[name].__path__) != [folder]:
        name += "_"
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [folder]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return name
