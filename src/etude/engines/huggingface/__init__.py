"""Hugging Face: `BaseTrainer` for those who come with `transformers.Trainer`, and the engine `huggingface`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.engines.huggingface.engine import HuggingFaceEngine
    from etude.engines.huggingface.trainer import BaseTrainer

__all__ = ["BaseTrainer", "HuggingFaceEngine"]

__getattr__, __dir__ = lazily(
    __name__, {"engine": ["HuggingFaceEngine"], "trainer": ["BaseTrainer"]}, {"transformers": "hf", "accelerate": "hf"}
)
