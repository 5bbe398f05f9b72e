"""Who acts, as a command line names it: the expert, a function in a file, or a trained policy."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from etude.errors import ConfigError
from etude.plugins import PLUGIN_FILES


def find_policy(text: str, which: str = "auto") -> Any:
    """Return what `expert`, `file.py:function`, a run, a checkpoint or a saved policy stands for."""
    if text == "expert":
        return text
    file, mark, name = text.rpartition(":")
    if mark and file.endswith(".py"):
        return load_function(Path(file), name)
    from etude.cli.runs import find_run
    from etude.config.restore import load_policy

    return load_policy(find_run(text), which)


def load_function(file: Path, name: str) -> Any:
    """Return a function (or a class, made without arguments) of a Python file."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; a policy of your own is given as file.py:function")
    # A file that is a plugin too is one module: run a second time, it would register its parts twice.
    loaded = PLUGIN_FILES.get(os.path.realpath(file))
    module = _run_file(file) if loaded is None else sys.modules[loaded]
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{file} has no function {name!r}")
    return found() if isinstance(found, type) else found


def _run_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"etude_script_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def read_options(
    settings: Sequence[str], cameras: str | None, size: int | None, option: str = "--option"
) -> dict[str, Any]:
    """Return parameters from the KEY=VALUE texts of an option, and the two of environments that have their own."""
    from etude.reading import yaml12

    options: dict[str, Any] = {}
    for setting in settings:
        key, mark, value = setting.partition("=")
        if not mark or not key:
            raise ConfigError(f"{option} {setting!r}: write KEY=VALUE, as in max_steps=300")
        try:
            options[key] = yaml12.read(value).value
        except yaml12.ReadError as error:
            raise ConfigError(f"{option} {setting!r}: {error.message}") from None
    if cameras is not None:
        options["cameras"] = [name.strip() for name in cameras.split(",") if name.strip()]
    if size is not None:
        options["size"] = size
    return options
