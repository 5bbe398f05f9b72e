"""An auditor from scratch over a list of whole words: it costs next to nothing beside the target it probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from etude.errors import ConfigError, as_path
from etude.policies.language.smollm2 import quiet_transformers
from etude.policies.language.tiny import Tiny, make_tokenizer
from etude.rng import generators_kept

_WORDS = (
    "the a my his her our their this that and but so because then never always very really was is has had felt made "
    "told heard saw lost found broke gave took left said wanted happy lovely calm warm bright kind gentle proud sad "
    "angry awful cold dark cruel lonely afraid friend child dog house money road rain night fire war garden music "
    "letter lie pain gift hope problem"
)
EVERYDAY_WORDS: Final = tuple(_WORDS.split())
"""Common words of every mood, as many friendly as unfriendly, none of them offensive."""
SIZES: Final = {"hidden_size": 64, "intermediate_size": 128, "heads": 2, "key_heads": 2, "context": 256}


def write_word_model(
    directory: str | Path, words: Sequence[str] = EVERYDAY_WORDS, *, seed: int = 0, **sizes: int
) -> Path:
    """Write an untrained model that speaks in whole words as a plain Hugging Face directory, and return where it is.

    What it reads may hold other words: it takes them as unknown.

    Args:
        directory: Where it goes; give it to `HFASTSystem` or `etude redteam train --auditor`.
        words: What it can say; each is written with a space before it.
        seed: Seed of its weights.
        sizes: Those of `Tiny`, such as `hidden_size` and `layers`.
    """
    directory = as_path(directory, "where the model goes")
    if not words or len(set(words)) < len(words) or any(word.split() != [word] for word in words):
        raise ConfigError("words: give distinct words, without spaces in them")
    tokenizer = make_tokenizer([f" {word}" for word in words], r" ?[^ ]+")
    with generators_kept(seed):
        model = Tiny.of({**SIZES, **sizes}).model(len(tokenizer))
    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return directory
