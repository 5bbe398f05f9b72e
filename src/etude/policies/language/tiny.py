"""A tiny model from scratch: a Llama of two layers over single characters, for tests and quick experiments."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.reading.suggest import did_you_mean

CHARACTERS = "\n" + string.printable[:95]
END, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True, slots=True)
class Tiny:
    """The sizes of a tiny model; the defaults make about 0.4 million parameters."""

    vocabulary: str = CHARACTERS
    """The characters it reads and writes; others are read as unknown."""
    hidden_size: int = 128
    """Width of a token."""
    layers: int = 2
    """Blocks of attention and perceptron."""
    heads: int = 4
    """Attention heads of a block."""
    key_heads: int = 2
    """Heads of keys and values, which attention heads share."""
    intermediate_size: int = 384
    """Width inside the perceptron."""
    context: int = 512
    """Tokens that it sees at most."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Tiny:
        """Read sizes from a configuration."""
        known = [one.name for one in fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(f"unknown parameter {name!r} of a tiny model{did_you_mean(name, known)}")
        return cls(**value)

    def tokenizer(self) -> Any:
        """Return a plain Hugging Face tokenizer with one token per character; end and padding are one token, id 0."""
        return make_tokenizer(dict.fromkeys(self.vocabulary), r"[\s\S]", model_max_length=self.context)

    def model(self, vocabulary_size: int) -> Any:
        """Return a new model; its weights are drawn from the global generator."""
        transformers = import_extra("transformers", "llm")
        if self.hidden_size % self.heads or self.heads % self.key_heads:
            raise ConfigError(
                f"a tiny model's hidden_size ({self.hidden_size}) must be a multiple of its heads ({self.heads}), and "
                f"those of its key_heads ({self.key_heads})"
            )
        config = transformers.LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        return transformers.LlamaForCausalLM(config)


def make_tokenizer(tokens: Iterable[str], pattern: str, **options: Any) -> Any:
    """Return a plain Hugging Face tokenizer of whole pieces of text; end and padding are one token, id 0.

    Args:
        tokens: Every piece it knows; others are one unknown token.
        pattern: Regular expression of a piece.
        options: Further ones of `PreTrainedTokenizerFast`.
    """
    tokenizers, transformers = import_extra("tokenizers", "llm"), import_extra("transformers", "llm")
    numbers = {token: at for at, token in enumerate([END, UNKNOWN, *tokens])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False, **options,
    )  # fmt: skip
