"""Language models come with the `llm` extra: imported where they are used, and named where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from etude.errors import MissingExtraError


def import_llm(module: str) -> Any:
    """Import a module of the `llm` extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise MissingExtraError(
            f"{package} cannot be imported ({error}); language models need: pip install 'etude[llm]'"
        ) from error
