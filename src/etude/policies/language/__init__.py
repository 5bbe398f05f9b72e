"""Language models as policies: any causal model of Hugging Face, a GGUF file, or a tiny one from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.policies.language.build import language_model
    from etude.policies.language.head import LogProbs
    from etude.policies.language.lora import Lora
    from etude.policies.language.model import LanguageModel
    from etude.policies.language.sampling import Completion, Sampling
    from etude.policies.language.smollm2 import smollm2_path

__all__ = ["Completion", "LanguageModel", "LogProbs", "Lora", "Sampling", "language_model", "smollm2_path"]

_HOMES = {
    "Completion": "sampling",
    "LanguageModel": "model",
    "LogProbs": "head",
    "Lora": "lora",
    "Sampling": "sampling",
    "language_model": "build",
    "smollm2_path": "smollm2",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.policies.language' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"etude.policies.language.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
