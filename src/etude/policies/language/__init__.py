"""Language models as policies: any causal model of Hugging Face, a GGUF file, or a tiny one from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.policies.language.build import language_model
    from etude.policies.language.head import LogProbs
    from etude.policies.language.lora import Lora
    from etude.policies.language.model import LanguageModel
    from etude.policies.language.sampling import Completion, Sampling
    from etude.policies.language.smollm2 import smollm2_path

__all__ = ["Completion", "LanguageModel", "LogProbs", "Lora", "Sampling", "language_model", "smollm2_path"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "build": ["language_model"],
        "head": ["LogProbs"],
        "lora": ["Lora"],
        "model": ["LanguageModel"],
        "sampling": ["Completion", "Sampling"],
        "smollm2": ["smollm2_path"],
    },
)
