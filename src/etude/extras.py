"""Optional packages: imported where they are used, and named with the extra that brings them where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from etude.errors import MissingExtraError

EXTRAS: Final = {
    "accelerate": "hf", "fastapi": "service", "geomloss": "components", "gguf": "llm", "gymnasium": "sim",
    "h5py": "sim", "lightning": "lightning", "metaworld": "sim", "mujoco": "sim", "optuna": "sweep", "peft": "llm",
    "pyarrow": "sim", "ray": "ray", "reasoning_gym": "llm", "schedulefree": "components", "sklearn": "quickstart",
    "transformers": "hf", "zarr": "sim",
}  # fmt: skip
"""Which extra brings a module that a component may lack."""


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional package, or say which extra of Etude to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"{package} cannot be imported ({error}); run: pip install 'etude[{extra}]'") from error
