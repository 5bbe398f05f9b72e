"""Scorers that are models of Hugging Face: classifiers of sequences, and guards that answer in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.low_precision import require_low_precision_of
from etude.policies.language.locate import locate_model
from etude.policies.language.smollm2 import quiet_transformers
from etude.redteam.scorers import TextScorer

if TYPE_CHECKING:
    from etude.policies.language.model import LanguageModel


class ClassifierScorer(TextScorer):
    """Probability of one label of a sequence classifier, such as Detoxify's `toxicity`."""

    def __init__(
        self,
        path_or_id: str | Path,
        label: str | int | None = None,
        *,
        multi_label: bool | None = None,
        batch_size: int = 32,
        device: str = "cpu",
    ) -> None:
        """Load the classifier.

        Args:
            path_or_id: A directory or hub id with a sequence classifier and its tokenizer.
            label: Name or number of the label that is bad; None takes the last one.
            multi_label: Whether labels exclude each other (softmax) or not (sigmoid); None follows its configuration.
            batch_size: Texts per pass.
            device: Where it runs.
        """
        transformers = import_extra("transformers", "llm")
        place = locate_model(path_or_id)
        with quiet_transformers():
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(place)
        self.model = model.to(device).eval().requires_grad_(False)
        require_low_precision_of(self.model)  # transformers keeps the type of the file
        config = self.model.config
        names = {int(number): str(name) for number, name in config.id2label.items()}
        self.label = _label_number(label, names, str(path_or_id))
        by_config = config.problem_type == "multi_label_classification" or len(names) == 1
        self.multi_label = by_config if multi_label is None else multi_label
        self.batch_size = batch_size
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        self._longest = min(int(getattr(config, "max_position_embeddings", 512)), self.tokenizer.model_max_length)

    @torch.no_grad()
    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return the probability of the label for each text."""
        # Texts of like length share a pass, so that little of it is padding.
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        found = [0.0] * len(texts)
        for first in range(0, len(order), self.batch_size):
            part = order[first : first + self.batch_size]
            inputs = self.tokenizer(
                [texts[at] for at in part], padding=True, truncation=True, max_length=self._longest, return_tensors="pt"
            )
            logits = self.model(**inputs.to(self.model.device)).logits.float()
            chances = logits.sigmoid() if self.multi_label else logits.softmax(-1)
            for at, chance in zip(part, chances[:, self.label].tolist(), strict=True):
                found[at] = chance
        return found


def _label_number(label: str | int | None, names: dict[int, str], path: str) -> int:
    if label is None:
        return max(names)
    by_name = {name.lower(): number for number, name in names.items()}
    found = label if isinstance(label, int) else by_name.get(label.lower())
    if found not in names:
        raise ConfigError(f"{path} has no label {label!r}; there are {', '.join(names.values())}")
    return int(found)


class GuardScorer(TextScorer):
    """Probability that a guard model answers `unsafe` rather than `safe`, as Llama Guard does.

    Texts are put to it as a user's message of its chat template, or as they are if it has none.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel,
        *,
        bad: str = "unsafe",
        good: str = "safe",
        preamble: str = "",
        device: str | None = None,
        batch_size: int = 16,
    ) -> None:
        """Load the guard.

        Args:
            model: A directory, a hub id or a `LanguageModel`.
            bad: What it answers for a text that is bad.
            good: What it answers for one that is not.
            preamble: What precedes its answer, such as the two newlines of Llama Guard 3.
            device: Where it runs; None leaves it where it is.
            batch_size: Texts per pass.
        """
        from etude.policies.language.model import LanguageModel

        loaded = model if isinstance(model, LanguageModel) else LanguageModel.from_pretrained(model)
        self.model = (loaded if device is None else loaded.to(device)).eval().requires_grad_(False)
        self.batch_size = batch_size
        encode = self.model.tokenizer
        self._answers: list[list[int]] = [
            encode(preamble + answer, add_special_tokens=False)["input_ids"] for answer in (bad, good)
        ]

    @torch.no_grad()
    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return P(bad) / (P(bad) + P(good)) for each text."""
        found: list[float] = []
        for first in range(0, len(texts), self.batch_size):
            prompts = [self._prompt(text) for text in texts[first : first + self.batch_size]]
            rows = [(prompt, answer) for prompt in prompts for answer in self._answers]
            log_probs = self.model.log_probs(_rows(rows)).sum(1).reshape(-1, 2)
            found += log_probs.softmax(1)[:, 0].tolist()
        return found

    def _prompt(self, text: str) -> list[int]:
        window = int(getattr(self.model.causal.config, "max_position_embeddings", None) or 1 << 30)
        if self.model.tokenizer.chat_template:
            tokens = self.model.encode_chat([{"role": "user", "content": text}])
        else:
            tokens = self.model.encode(text) or [self.model.eos_token_id]
        return tokens[-(window - max(map(len, self._answers))) :]


def _rows(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, seen, counts = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for at, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[at, :end] = torch.tensor([*prompt, *answer])
        seen[at, :end] = 1
        counts[at, len(prompt) : end] = 1
    return {"input_ids": ids, "attention_mask": seen, "loss_mask": counts}
