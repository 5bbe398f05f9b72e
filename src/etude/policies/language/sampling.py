"""How completions are drawn, and what comes back. Imports no torch.

Completion `j` of the prompt with key `k` draws token `t` with the number that `fold(seed, k, j, t)` names: neither the
global generators nor the neighbours in a batch have any part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from etude.errors import ConfigError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw completions."""

    max_new_tokens: int = 32
    """Tokens at most, the one that stops included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this much probability together."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 is all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. They stay in its tokens (whole tokens were sampled) and are cut from its text."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end tokens."""
    seed: int = 0
    greedy: bool = False
    """Take the likeliest token every time."""
    ends: bool = True
    """Whether the model's own end tokens end a completion."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, and accept lists, as configurations give them."""
        stop: Any = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_tokens", tuple(int(token) for token in self.stop_tokens))
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ConfigError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must not be negative, got {self.top_k}")
        if not all(self.stop):
            raise ConfigError(f"stop must hold texts that are not empty, got {self.stop!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether no random numbers are used."""
        return self.greedy or self.temperature == 0

    @property
    def scale(self) -> float:
        """The temperature of the returned log-probabilities: 1 for a temperature of 0."""
        return self.temperature or 1.0


@dataclass(slots=True)
class Completion:
    """One completion: what was sampled after the prompt, and how likely it was."""

    tokens: list[int]
    """Every sampled token, the one that ended it included."""
    logprobs: list[float]
    """Log-probability of each token under softmax(logits / temperature) over the whole vocabulary.

    That is what `LanguageModel.log_probs(batch, temperature=...)` computes. With `top_k` or `top_p` tokens are drawn
    from a part of that distribution, whose probabilities are larger by a common factor that is not included here.
    """
    text: str
    """The decoded tokens without special tokens, cut before a stop text."""
    finish_reason: FinishReason
    """`stop`: an end token or a stop text came; `length`: there was no more room."""


def uniforms(seed: int, keys: Sequence[int], indices: Sequence[int], length: int) -> np.ndarray:
    """Return numbers in [0, 1), one per row and token: row r follows fold(seed, keys[r], indices[r])."""
    from etude.rng import fold, fold_array

    rows = np.array([fold(seed, key, index) for key, index in zip(keys, indices, strict=True)], dtype=np.uint64)
    bits = fold_array(rows[:, None], np.arange(length, dtype=np.uint64)[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
