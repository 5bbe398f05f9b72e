"""The language policy as configurations name it: `policy: {type: language, params: {...}}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from etude.errors import ConfigError
from etude.signatures.nested import ParametersOf

if TYPE_CHECKING:
    from etude.policies.language.model import LanguageModel


def language_model(
    path: str | None = None,
    gguf: str | None = None,
    tiny: bool | Annotated[dict[str, Any], ParametersOf("etude.policies.language.tiny:Tiny")] | None = None,
    lora: int | Annotated[dict[str, Any], ParametersOf("etude.policies.language.lora:Lora")] | None = None,
    value_head: bool = False,
    dtype: str = "float32",
    max_rows: int = 64,
    seed: int | None = None,
) -> LanguageModel:
    """A causal language model: from a path or hub id, a GGUF file, or tiny and from scratch.

    Args:
        path: Directory or hub id of the model, or `smollm2` for the embedded SmolLM2-135M-Instruct.
        gguf: GGUF file to read instead: its path, or with `path` its name in there.
        tiny: Make a tiny character model instead: true, or its vocabulary and sizes (vocabulary, hidden_size, layers,
            heads, key_heads, intermediate_size, context).
        lora: Train adapters instead of all weights: their rank, or rank, alpha, dropout and targets.
        value_head: Whether to add a value head, as algorithms with a critic need.
        dtype: float32, float64, bfloat16 or float16.
        max_rows: Completions computed side by side.
        seed: Seed of new weights; follows from the training seed if it is not given.
    """
    from etude.policies.language.model import LanguageModel

    if (path is None and gguf is None) == (tiny is None or tiny is False):
        raise ConfigError("a language policy needs one of path (or gguf) and tiny")
    options: dict[str, Any] = {"lora": lora, "value_head": value_head, "dtype": dtype, "seed": seed}
    if tiny is not None and tiny is not False:
        policy = LanguageModel.tiny(**(tiny if isinstance(tiny, dict) else {}), **options)
    elif path is None:
        policy = LanguageModel.from_pretrained(str(gguf), **options)
    else:
        policy = LanguageModel.from_pretrained(path, gguf_file=gguf, **options)
    policy.max_rows = max_rows
    return policy
