"""Names imported on first use, so that a package costs nothing until a part of it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from etude.errors import MissingExtraError


def lazily(
    package: str, homes: Mapping[str, Iterable[str]], needs: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: Its name.
        homes: The names that each of its modules has; `..room.module` is one of another room.
        needs: Packages that all of them need, with the extra that brings each.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        for needed, extra in (needs or {}).items():
            if find_spec(needed) is None:
                raise MissingExtraError(f"{name} needs {needed}; run: pip install 'etude[{extra}]'")
        value = getattr(import_module(f".{home_of[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return get, names
