"""The models that a service offers, each loaded once: what is trained on top of one shares its memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from torch import nn

from etude.errors import ConfigError
from etude.policies.language import LanguageModel
from etude.policies.language.lora import Lora
from etude.policies.language.source import ModelSource
from etude.policies.language.tiny import Tiny
from etude.rng import generators_kept

LORA_ALPHA: Final = 32.0
"""Scale of adapters times their rank: the learning rate that fits one rank then fits the others. tinker-cookbook's
`hyperparam_utils` supposes 32, and so do the experiments its rates come from."""
EMBEDDED: Final = ("tiny", "smollm2")
MAX_RANK: Final = 512


@dataclass(frozen=True)
class Adapter:
    """Which weights a model trains: adapters of a rank on some layers, or with rank 0 all weights."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def form(self) -> tuple[Any, ...]:
        """What decides the names and shapes of the weights."""
        return self.rank, self.train_attn, self.train_mlp, self.train_unembed


class Bases:
    """Base models by name."""

    def __init__(self, names: Sequence[str]) -> None:
        """Offer models.

        Args:
            names: `tiny`, `smollm2`, or directories of Hugging Face models; a directory is offered by its last name,
                and each of them by another one as `NAME=WHAT`.
        """
        self._sources: dict[str, tuple[ModelSource, str | None]] = {}
        for name in names:
            key, source, tokenizer = _source_of(name)
            if key in self._sources:
                raise ConfigError(f"two models are named {key!r}; give one of them another name: --model NAME=WHAT")
            self._sources[key] = source, tokenizer
        self._loaded: dict[str, LanguageModel] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """What can be asked for."""
        return list(self._sources)

    def require(self, name: str) -> None:
        """Refuse a name that is not offered."""
        if name not in self._sources:
            raise ConfigError(f"there is no base model {name!r}; this service offers {', '.join(self._sources)}")

    def tokenizer_path(self, name: str, folder: Path) -> str:
        """Return the directory that the tokenizer of a model is loaded from: its own, or one written into a folder."""
        own = self._sources[name][1]
        if own is not None:
            return own
        tokenizer, place = self.get(name).tokenizer, folder.resolve() / f"of-{quote(name, safe='')}"
        with self._lock:
            if not place.is_dir():
                part = place.with_name(f"{place.name}.part")
                tokenizer.save_pretrained(part)
                part.rename(place)
        return str(place)

    def get(self, name: str) -> LanguageModel:
        """Return a base model, frozen; it is loaded when it is first asked for."""
        self.require(name)
        with self._lock:
            if name not in self._loaded:
                source = self._sources[name][0]
                model, tokenizer = source.load(), source.load_tokenizer()
                self._loaded[name] = LanguageModel(model.eval().requires_grad_(False), tokenizer, source=source)
            return self._loaded[name]

    def context(self, name: str) -> int:
        """Return how many tokens a model can see."""
        return int(getattr(self.get(name).causal.config, "max_position_embeddings", 1 << 30))

    def vocabulary(self, name: str) -> int:
        """Return how many tokens a model knows."""
        return int(self.get(name).causal.get_output_embeddings().weight.shape[0])

    def make(self, name: str, adapter: Adapter | None) -> LanguageModel:
        """Return a new policy on a base model: adapters beside its weights, or with rank 0 a copy of all of them.

        Without an adapter it is the base model, to be used by one thread.
        """
        base = self.get(name)
        with self._lock:
            if adapter is not None and not adapter.rank:
                model = deepcopy(base.model).requires_grad_(True)
                return LanguageModel(model, base.tokenizer)
            shared: dict[int, Any] = {id(one): one for one in (*base.model.parameters(), *base.model.buffers())}
            model = deepcopy(base.model, shared)
            if adapter is None:
                return LanguageModel(model, base.tokenizer)
            lora = Lora(rank=adapter.rank, alpha=LORA_ALPHA, targets=_targets(model, adapter))
            with generators_kept(adapter.seed):
                return LanguageModel(lora.apply(model), base.tokenizer)


def _source_of(given: str) -> tuple[str, ModelSource, str | None]:
    """Return the name of a model, where it comes from, and the directory of its tokenizer, if there is one."""
    name, _, what = given.rpartition("=")
    if Path(given).expanduser().is_dir():
        name, what = "", given
    elif "=" in given and not (name.strip() and what.strip()):
        raise ConfigError(f"{given!r} offers no model: write NAME=MODEL, or MODEL alone")
    if what in EMBEDDED:
        return name or what, ModelSource(tiny=Tiny()) if what == "tiny" else ModelSource(what), None
    path = Path(what).expanduser()
    if not path.is_dir():
        raise ConfigError(f"there is no model {what!r}: name {' or '.join(EMBEDDED)}, or a directory of one")
    return name or path.resolve().name, ModelSource(str(path)), str(path.resolve())


def _targets(model: Any, adapter: Adapter) -> list[str]:
    """Return the names of the linear layers that get adapters: those of attention, of perceptrons, and the head."""
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if module is head:
            wanted = adapter.train_unembed
        elif not is_linear:
            wanted = False
        else:
            wanted = adapter.train_attn if "attn" in name or "attention" in name else adapter.train_mlp
        if wanted:
            found.append(name)
    if not found:
        raise ConfigError("nothing would be trained: switch on train_attn, train_mlp or train_unembed")
    return found
