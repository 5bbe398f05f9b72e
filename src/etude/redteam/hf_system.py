"""`HFASTSystem`: auditor, target and baseline as language models of Hugging Face, each on its own device.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.policies.base import evaluating
from etude.policies.language.locate import locate_model
from etude.policies.language.model import LanguageModel
from etude.policies.language.sampling import Sampling
from etude.reading.suggest import did_you_mean
from etude.redteam.ast_system import ASTSystem, Utterance, Who, mean_or_none
from etude.rollouts.system import Scorer, ValueFunctionSystem

Model = str | Path | LanguageModel
Text = str | Sequence[int]
_ROLES = ("auditor", "target", "baseline")
AUDITOR_SAMPLING = Sampling(max_new_tokens=32)
TARGET_SAMPLING = Sampling(max_new_tokens=32, top_p=0.9, top_k=50)


class HFASTSystem(ASTSystem, ValueFunctionSystem):
    """Language models that audit each other.

    Contexts, probes and responses are texts. What a model sampled is kept as it was sampled, in `Node.extra`: the
    tokens of its prompt, its own tokens and their log-probabilities; training never tokenises a probe again. Where
    log-probabilities are asked for, tokens of the auditor's tokenizer are taken in place of texts.
    """

    def __init__(
        self,
        auditor: Model | None = None,
        target: Model = "smollm2",
        baseline: Model | None = None,
        scorer: Scorer | str | None = None,
        *,
        devices: str | Mapping[str, str] | None = None,
        tester: Model | None = None,
        lora: Any = None,
        value_head: bool = False,
        auditor_sampling: Sampling | Mapping[str, Any] = AUDITOR_SAMPLING,
        target_sampling: Sampling | Mapping[str, Any] = TARGET_SAMPLING,
        chat: bool = False,
        dtype: str = "float32",
        seed: int = 0,
        **reward: float,
    ) -> None:
        """Load the models.

        Args:
            auditor: What is trained: a directory, a hub id, `smollm2`, or a `LanguageModel`.
            target: What is probed; it is frozen.
            baseline: What the auditor is held near by DPO, IPO and the KL term of PPO; None takes the auditor as it
                was before training (with LoRA its base weights, which costs no memory).
            scorer: Says how bad a text is, or the name of what does; None takes `ProfanityScorer`.
            devices: One device for all, or one for each of auditor, target and baseline. Models that are loaded here go
                to the CPU unless told; those that are given stay where they are.
            tester: Another name for `auditor`.
            lora: Train adapters of the auditor instead of all its weights: a rank, or parameters of `Lora`.
            value_head: Whether the auditor has a value head, as PPO needs.
            auditor_sampling: How probes are drawn. PPO learns from the whole distribution: leave top_p and top_k alone.
            target_sampling: How responses are drawn.
            chat: Whether the target gets what was said as a user's message of its chat template.
            dtype: Type of the weights of models that are loaded here.
            seed: Seed of new adapters.
            reward: Weights of the reward, see `ASTSystem`.
        """
        super().__init__(scorer, **reward)
        auditor = tester if auditor is None else auditor
        if auditor is None:
            raise ConfigError("HFASTSystem needs an auditor")
        for model in (auditor, target, *([] if baseline is None else [baseline])):
            if not isinstance(model, LanguageModel) and str(model) != "smollm2":
                _check_there(model)  # all of them before the first is loaded
        places = _devices(devices)
        options = {"lora": lora, "value_head": value_head, "seed": seed}
        if isinstance(auditor, LanguageModel) and (lora is not None or value_head):
            raise ConfigError("lora and value_head belong to the auditor's making: give them to LanguageModel")
        self.auditor = _loaded(auditor, places.get("auditor"), dtype, **options)
        self.target = self._frozen(target, places.get("target"), dtype)
        self.baseline: LanguageModel | None = None
        if baseline is not None:
            place = places.get("baseline")
            shared = isinstance(baseline, str | Path) and baseline == target and place == places.get("target")
            self.baseline = self.target if shared else self._frozen(baseline, place, dtype)
        self.auditor_sampling, self.target_sampling = _sampling(auditor_sampling), _sampling(target_sampling)
        self.chat = chat
        self._alike: dict[int, bool] = {}

    def _frozen(self, model: Model, device: str | None, dtype: str) -> LanguageModel:
        if model is self.auditor:
            raise ConfigError(
                "the auditor cannot be its own target or baseline, which must not change as it learns; give a path, "
                "or another LanguageModel"
            )
        frozen: LanguageModel = _loaded(model, device, dtype).eval().requires_grad_(False)
        return frozen

    @property
    def tokenizer(self) -> Any:
        """The auditor's tokenizer."""
        return self.auditor.tokenizer

    @property
    def has_values(self) -> bool:
        """Whether the auditor has a value head."""
        return self.auditor.value_head is not None

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the auditor's parameters, its value head's included; with LoRA the frozen ones, too."""
        return self.auditor.parameters()

    # ---- speaking ----------------------------------------------------------------------------------------------------

    def speak(self, who: Who, contexts: Sequence[Text], keys: Sequence[int], n: int = 1) -> list[list[Utterance]]:
        """Return `n` utterances for each context in one batch, each on a random stream of its own."""
        model, sampling = (
            (self.auditor, self.auditor_sampling) if who == "auditor" else (self.target, self.target_sampling)
        )
        room = _window(model) - sampling.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"max_new_tokens={sampling.max_new_tokens} leaves no room for a context in the {who}'s window of "
                f"{_window(model)} tokens"
            )
        prompts = [self._prompt(model, text, who)[-room:] for text in contexts]
        found = model.generate(prompts, sampling, n=n, keys=keys)
        return [
            [
                Utterance(
                    said.text,
                    {
                        "prompt": prompt,
                        "tokens": said.tokens,
                        "logprobs": said.logprobs,
                        "finish_reason": said.finish_reason,
                    },
                )
                for said in group
            ]
            for prompt, group in zip(prompts, found, strict=True)
        ]

    def _prompt(self, model: LanguageModel, text: Text, who: Who) -> list[int]:
        if who == "target" and self.chat and isinstance(text, str):
            return model.encode_chat([{"role": "user", "content": text}])
        return self._context_tokens(model, text)

    def rollout_prompt_with_auditor(self, x: Sequence[Text]) -> Sequence[str]:
        """Return a probe for each context; which one follows from torch's global generator."""
        return self._said("auditor", x)

    def rollout_prompt_with_target(self, x: Sequence[Text]) -> Sequence[str]:
        """Return a response to each text; which one follows from torch's global generator."""
        return self._said("target", x)

    def _said(self, who: Who, x: Sequence[Text]) -> list[str]:
        keys = torch.randint(1 << 62, (len(x),)).tolist()
        return [group[0].text for group in self.speak(who, x, keys)]

    # ---- log-probabilities -------------------------------------------------------------------------------------------

    def get_auditor_logprobs(self, context: Sequence[Text], continuation: Sequence[Text]) -> Tensor:
        """Return log p(continuation | context) under the auditor, at the temperature it samples with."""
        return self._log_probs(self.auditor, context, continuation, self.auditor_sampling.scale)[0]

    @torch.no_grad()
    def get_target_logprobs(self, context: Sequence[Text], continuation: Sequence[Text]) -> Tensor:
        """Return log p(continuation | context) under the target, at temperature 1; never with a graph."""
        return self._log_probs(self.target, context, continuation)[0]

    @torch.no_grad()
    def get_baseline_logprobs(self, context: Sequence[Text], continuation: Sequence[Text]) -> Tensor:
        """Return log p(continuation | context) under the baseline, as for the auditor; never with a graph."""
        scale = self.auditor_sampling.scale
        if self.baseline is not None:
            return self._log_probs(self.baseline, context, continuation, scale)[0]
        # Dropout has no place in a reference, which with LoRA is this very model.
        with evaluating(self.auditor), self.auditor.reference() as reference:
            return self._log_probs(reference, context, continuation, scale)[0]

    def value(self, context: Sequence[Text], continuation: Sequence[Text]) -> Tensor:
        """Return the value before each token of the continuation, by the auditor's value head."""
        return self.logprobs_and_values(context, continuation)[1]

    def logprobs_and_values(self, context: Sequence[Text], continuation: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """Return the auditor's log-probabilities and values in one pass."""
        found, values = self._log_probs(self.auditor, context, continuation, self.auditor_sampling.scale, True)
        assert values is not None
        return found, values

    @torch.no_grad()
    def mean_log_likelihood(self, context: Sequence[Text], probe: Sequence[Text]) -> list[float]:
        """Return the mean log-probability per token of each probe under the target; -inf for one without tokens."""
        counts_B = torch.tensor([len(self._continuation_tokens(self.target, one)) for one in probe])
        return mean_or_none(self.get_target_logprobs(context, probe).sum(1).cpu(), counts_B)

    def _log_probs(
        self,
        model: LanguageModel,
        contexts: Sequence[Text],
        continuations: Sequence[Text],
        temperature: float = 1.0,
        with_values: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities, and values if asked, of the tokens of each continuation: (B, T), 0 where padded."""
        window = _window(model)
        rows, starts, lengths = [], [], []
        for context, continuation in zip(contexts, continuations, strict=True):
            own = self._continuation_tokens(model, continuation)
            if len(own) >= window:
                raise ConfigError(f"a text of {len(own)} tokens does not fit into the window of {window}")
            before = self._context_tokens(model, context)[-(window - len(own)) :]
            rows.append([*before, *own])
            starts.append(len(before))
            lengths.append(len(own))
        batch, place_BT, counts_BT = _batch(rows, starts, lengths, model.device)
        found = model.log_probs(batch, temperature=temperature, with_values=with_values)
        log_probs = found.log_probs if with_values else found
        picked = torch.where(counts_BT, log_probs.gather(1, place_BT), 0.0)
        if not with_values:
            return picked, None
        return picked, torch.where(counts_BT, found.values.gather(1, place_BT), 0.0)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _context_tokens(self, model: LanguageModel, text: Text) -> list[int]:
        """Return a context as a model reads it; never empty, for something must come before the first token."""
        tokens = model.encode(text) if isinstance(text, str) else self._own_tokens(model, text, model.encode)
        first = model.tokenizer.bos_token_id
        return tokens or [model.eos_token_id if first is None else int(first)]

    def _continuation_tokens(self, model: LanguageModel, text: Text) -> list[int]:
        """Return what continues a context, without the special tokens that a text begins with."""

        def encode(text: str) -> list[int]:
            tokens: list[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
            return tokens

        return encode(text) if isinstance(text, str) else self._own_tokens(model, text, encode)

    def _own_tokens(self, model: LanguageModel, tokens: Sequence[int], encode: Any) -> list[int]:
        """Return tokens of the auditor as tokens of a model: the same where they share a vocabulary."""
        if model.tokenizer is self.tokenizer:
            return list(tokens)
        kept = id(model.tokenizer)
        if kept not in self._alike:
            self._alike[kept] = model.tokenizer.get_vocab() == self.tokenizer.get_vocab()
        if self._alike[kept]:
            return list(tokens)
        own: list[int] = encode(self.auditor.decode(tokens))
        return own


def _loaded(model: Model, device: str | None, dtype: str, **options: Any) -> LanguageModel:
    if not isinstance(model, LanguageModel):
        model = LanguageModel.from_pretrained(model, dtype=dtype, **options)
    return model if device is None else model.to(device)


def _check_there(model: Any) -> None:
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"a model is a path, a hub id or a LanguageModel; wrap {type(model).__name__} in LanguageModel"
        )
    if not (isinstance(model, str | Path) and Path(model).suffix == ".gguf" and Path(model).is_file()):
        locate_model(model)


def _devices(given: str | Mapping[str, str] | None) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, str | torch.device):
        return dict.fromkeys(_ROLES, str(given))
    known = {{"tester": "auditor"}.get(role, role): str(device) for role, device in given.items()}
    for role in known:
        if role not in _ROLES:
            raise ConfigError(f"devices: unknown model {role!r}{did_you_mean(role, _ROLES)}")
    return known


def _sampling(given: Sampling | Mapping[str, Any]) -> Sampling:
    if isinstance(given, Sampling):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"sampling must be a Sampling or a mapping such as {{'max_new_tokens': 8}}, got {given!r}")
    known = list(Sampling.__dataclass_fields__)
    for name in given:
        if name not in known:
            raise ConfigError(f"sampling: unknown parameter {name!r}{did_you_mean(name, known)}")
    try:
        return Sampling(**given)
    except TypeError as error:
        raise ConfigError(f"sampling: {error}, got {dict(given)}") from None


def _window(model: LanguageModel) -> int:
    return int(getattr(model.causal.config, "max_position_embeddings", None) or 1 << 30)


def _batch(
    rows: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int], device: torch.device
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return rows as a batch padded on the right, where in it each token of a continuation is, and which count."""
    width, longest = max(map(len, rows), default=1), max([1, *lengths])
    ids, seen, counts = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for at, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[at, : len(row)] = torch.tensor(row)
        seen[at, : len(row)] = 1
        counts[at, start : len(row)] = 1
    steps_T = torch.arange(longest)
    place_BT = (torch.tensor(starts).reshape(-1, 1) + steps_T).clamp(max=width - 1)
    inside_BT = steps_T < torch.tensor(lengths).reshape(-1, 1)
    batch = {"input_ids": ids, "attention_mask": seen, "loss_mask": counts}
    return {name: value.to(device) for name, value in batch.items()}, place_BT.to(device), inside_BT.to(device)
