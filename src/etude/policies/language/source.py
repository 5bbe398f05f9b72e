"""Where a language model comes from, so that it can be made again: to be resumed, or as its own reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.errors import CheckpointError, ConfigError
from etude.extras import import_extra
from etude.low_precision import require_low_precision
from etude.policies.language.locate import locate_model
from etude.policies.language.smollm2 import load_gguf, quiet_transformers, smollm2_path
from etude.policies.language.tiny import Tiny
from etude.rng import generators_kept

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A path or hub id, a GGUF file in it, or the sizes of a tiny model and the seed of its weights."""

    path: str | None = None
    gguf_file: str | None = None
    tiny: Tiny | None = None
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse types that are none."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; one of {', '.join(DTYPES)}")

    def load(self) -> Any:
        """Return the model, in eval mode; the global generators are left as they were."""
        require_low_precision(self.dtype)
        if self.tiny is not None:
            with generators_kept(self.seed):
                return self.tiny.model(len(self.load_tokenizer())).to(DTYPES[self.dtype]).eval()
        transformers = import_extra("transformers", "llm")
        with self._explained(), quiet_transformers():
            path = self._local()
            if self.gguf_file is not None:
                return load_gguf(Path(path) / self.gguf_file).to(DTYPES[self.dtype])
            return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[self.dtype]).eval()

    def load_tokenizer(self) -> Any:
        """Return the tokenizer that belongs to the model."""
        if self.tiny is not None:
            return self.tiny.tokenizer()
        transformers = import_extra("transformers", "llm")
        given = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        with self._explained(), quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(self._local(), **given)

    def _local(self) -> str:
        path = str(self.path)
        if path == "smollm2" and not Path(path).exists():
            return str(smollm2_path())
        return locate_model(path)

    def _explained(self) -> _Explained:
        return _Explained(str(self.path))


class _Explained:
    """Context in which what transformers says about an unreadable model becomes one sentence."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError | ValueError) and not isinstance(error, CheckpointError | ConfigError):
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"cannot load a language model from {self._path!r}: {reason}") from error
