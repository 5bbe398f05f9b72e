"""Hugging Face: `BaseTrainer` for those who come with `transformers.Trainer`, and the engine `huggingface`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.engines.huggingface.engine import HuggingFaceEngine
    from etude.engines.huggingface.trainer import BaseTrainer

__all__ = ["BaseTrainer", "HuggingFaceEngine"]

_HOMES = {"BaseTrainer": "trainer", "HuggingFaceEngine": "engine"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.engines.huggingface' has no attribute {name!r}")
    from importlib import import_module
    from importlib.util import find_spec

    from etude.errors import MissingExtraError

    for package in ("transformers", "accelerate"):
        if find_spec(package) is None:
            raise MissingExtraError(f"{name} needs {package}; pip install 'etude[hf]'")
    return getattr(import_module(f"etude.engines.huggingface.{_HOMES[name]}"), name)
