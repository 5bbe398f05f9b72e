"""Simulators and codecs come with the `sim` extra: imported where they are used, and named where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from etude.errors import MissingExtraError


def import_extra(module: str) -> Any:
    """Import a module of the `sim` extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{package} cannot be imported ({error}); simulation needs: pip install 'etude[sim]'"
        ) from error
