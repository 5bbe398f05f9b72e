"""Low-rank adapters: train a few small matrices beside frozen weights, with peft."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.reading.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Lora:
    """What adapters to add."""

    rank: int = 16
    alpha: float | None = None
    """Scale times rank; None is twice the rank."""
    dropout: float = 0.0
    targets: str | Sequence[str] = "all-linear"
    """Names of the layers that get one; `all-linear` is every linear layer but the head."""

    def __post_init__(self) -> None:
        """Refuse ranks that are none."""
        if self.rank < 1:
            raise ConfigError(f"a LoRA rank must be at least 1, got {self.rank}")

    @classmethod
    def of(cls, value: Lora | int | Mapping[str, Any] | None) -> Lora | None:
        """Read adapters from a configuration: a rank, a mapping of parameters, True for the defaults, or None."""
        if value is None or value is False or isinstance(value, Lora):
            return value or None
        if value is True:
            return cls()
        if isinstance(value, int):
            return cls(rank=value)
        known = [one.name for one in fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(f"unknown LoRA parameter {name!r}{did_you_mean(name, known)}")
        return cls(**value)

    def apply(self, model: Any) -> Any:
        """Return the model with adapters, everything else frozen."""
        peft = import_extra("peft", "llm")
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
        )
        with warnings.catch_warnings():
            # Of adapters on a head that is tied to the embedding: `merged` unties them.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            return peft.get_peft_model(model, config)


def merged(model: Any) -> Any:
    """Return a copy of a peft model with its adapters merged into plain weights.

    Adapters on the head or the embedding part the two, if they were one: each gets a weight of its own.
    """
    model = deepcopy(model)
    causal = model.get_base_model()
    read, written = causal.get_input_embeddings(), causal.get_output_embeddings()
    if read.weight is written.weight and (hasattr(read, "base_layer") or hasattr(written, "base_layer")):
        plain = getattr(written, "base_layer", written)
        plain.weight = type(plain.weight)(plain.weight.detach().clone(), requires_grad=plain.weight.requires_grad)
        causal.config.tie_word_embeddings = False
    return model.merge_and_unload()
