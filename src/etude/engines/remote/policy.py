"""`RemotePolicy`: stands where a language model stands, while a service has its weights.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from etude.engines.remote.connection import RemoteService, numbers
from etude.errors import ConfigError, DataError
from etude.policies.language.sampling import Completion, Sampling
from etude.rng import fold
from etude.types import Loss

_OF_TEXT: Final = frozenset(
    [
        "tokenizer",
        "encode",
        "encode_chat",
        "encode_continuation",
        "decode",
        "pad_token_id",
        "eos_token_id",
        "end_tokens",
    ]
)
"""What is asked of the model here: it has the tokenizer."""
_LARGEST_SEED: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Text:
    """One row of a batch, as a service reads it: the numbers of a token stand where it is predicted."""

    row: int
    tokens: list[int]
    """The whole text; the first token is predicted by nothing."""
    places_N: Tensor
    """The columns of the tokens from the second on."""
    counted_N: Tensor
    """Which of them count."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What every datum of it holds."""
        return {"target_tokens": torch.tensor(self.tokens[1:])}


def texts_of(batch: Any) -> list[Text]:
    """Return the rows of a batch in which anything counts."""
    ids_BT: Tensor = batch["input_ids"]
    seen_BT = _field(batch, "attention_mask", ids_BT)
    counted_BT = _field(batch, "loss_mask", seen_BT)
    found = []
    for row in range(ids_BT.shape[0]):
        columns = seen_BT[row].nonzero().flatten()
        places_N = columns[1:]
        counted_N = counted_BT[row, places_N]
        if bool(counted_N.any()):
            found.append(Text(row, ids_BT[row, columns].tolist(), places_N, counted_N))
    return found


def _field(batch: Any, name: str, default: Tensor) -> Tensor:
    try:
        found: Tensor = batch[name]
    except KeyError:
        return torch.ones_like(default, dtype=torch.bool) if name == "attention_mask" else default
    return found != 0


Answer = Callable[[Any, Sequence[Text]], Tensor]
"""From a batch and its texts to log-probabilities (B, T)."""


class RemotePolicy(nn.Module):
    """A language model whose weights are on a service: it draws and computes there, and writes and reads text here.

    Args:
        local: The model here, for its tokenizer.
        service: Has the weights.
    """

    def __init__(self, local: Any, service: RemoteService) -> None:
        super().__init__()
        lacking = sorted(name for name in _OF_TEXT if not hasattr(local, name))
        if lacking:
            raise ConfigError(
                f"engine remote trains language models; {type(local).__name__} has no {lacking[0]}, which texts need"
            )
        # None of the model here is a part of this one: it is neither trained nor saved.
        self.__dict__["local"], self.__dict__["service"] = local, service
        self.stand_in = nn.Parameter(torch.zeros(()))
        """A parameter for schedules to be made of; it is never changed."""
        self.answer: Answer = self.ask

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["local"], name) if name in _OF_TEXT else super().__getattr__(name)

    @property
    def trained_at(self) -> str:
        """Where the weights are."""
        return str(self.__dict__["service"].url)

    @property
    def device(self) -> torch.device:
        """Where batches are to be."""
        return self.stand_in.device

    # ---- training ----------------------------------------------------------------------------------------------------

    def log_probs(
        self, batch: Any, *, temperature: float = 1.0, with_values: bool = False, with_entropy: bool = False
    ) -> Tensor:
        """Return the log-probability of every counted token given those before it, (B, T) and zero elsewhere."""
        if with_values or with_entropy:
            raise ConfigError(
                f"engine remote: a service gives log-probabilities, not {'values' if with_values else 'entropies'}; "
                f"{'take an algorithm without a value head' if with_values else 'set entropy_coef to 0'}"
            )
        if temperature != 1.0:
            raise ConfigError(f"engine remote: a service computes at temperature 1, not {temperature:g}; draw at 1 too")
        return self.answer(batch, texts_of(batch))

    def forward(self, batch: Any) -> Loss:
        """Return the cross-entropy of the counted tokens, each weighed by its `loss_mask` if there is one."""
        log_probs_BT, texts = self.log_probs(batch), texts_of(batch)
        given_BT = batch["loss_mask"] if "loss_mask" in batch else torch.ones_like(log_probs_BT)
        weights_BT = place(batch, texts, [given_BT[text.row, text.places_N] for text in texts])
        return Loss(-(log_probs_BT * weights_BT).sum(), weights_BT.sum())

    def ask(self, batch: Any, texts: Sequence[Text]) -> Tensor:
        """Return what the service gives the tokens now, without gradient."""
        data = [self.service.datum(text.tokens[:-1], text.inputs) for text in texts]
        found = self.service.forward(data).loss_fn_outputs if data else []
        return place(batch, texts, [numbers(one["logprobs"]) for one in found])

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Context in which log-probabilities that a gradient is wanted of come from elsewhere."""
        before = self.answer

        def chosen(batch: Any, texts: Sequence[Text]) -> Tensor:
            return answer(batch, texts) if torch.is_grad_enabled() else self.ask(batch, texts)

        self.answer = chosen
        try:
            yield
        finally:
            self.answer = before

    @contextmanager
    def reference(self) -> Iterator[_Reference]:
        """Give the model before training."""
        with torch.no_grad():
            yield _Reference(self.service)

    # ---- generating --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        keys: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Return `n` completions of every prompt, drawn by the service from the weights as they are now."""
        sampling = sampling or Sampling()
        tokens = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        keys = range(len(tokens)) if keys is None else keys
        if len(keys) != len(tokens):
            raise DataError(f"generate needs one key per prompt, got {len(keys)} keys for {len(tokens)} prompts")
        if not tokens:
            return []
        service, sampler = self.service, self.service.sampler()
        make = service.tinker.ModelInput.from_ints
        params = [self._params(sampling, key) for key in keys]
        sent = [sampler.sample(make(prompt), n, one) for prompt, one in zip(tokens, params, strict=True)]
        drawn = [service.call("drawing", future.result).sequences for future in sent]
        return [[self._completion(one, sampling) for one in group] for group in drawn]

    def _params(self, sampling: Sampling, key: int) -> Any:
        if sampling.stop and sampling.stop_tokens:
            raise ConfigError("engine remote: a service stops at texts or at tokens; give stop or stop_tokens")
        stop: Any = list(sampling.stop) or list(sampling.stop_tokens) or (None if sampling.ends else [])
        seed = key if sampling.seed == 0 else fold(sampling.seed, key)
        return self.service.tinker.SamplingParams(
            max_tokens=sampling.max_new_tokens, seed=seed & _LARGEST_SEED, stop=stop, top_p=sampling.top_p,
            temperature=0.0 if sampling.is_greedy else sampling.temperature, top_k=sampling.top_k or -1,
        )  # fmt: skip

    def _completion(self, drawn: Any, sampling: Sampling) -> Completion:
        tokens, log_probs = [int(token) for token in drawn.tokens], drawn.logprobs
        if log_probs is None:
            raise DataError(f"the service at {self.service.url} draws without log-probabilities, which training needs")
        text: str = self.decode(tokens)
        ends = [text.index(word) for word in sampling.stop if word in text]
        finish = "stop" if drawn.stop_reason == "stop" else "length"
        return Completion(tokens, [float(one) for one in log_probs], text[: min(ends)] if ends else text, finish)  # type: ignore[arg-type]


class _Reference:
    """The base model, for divergences from it."""

    def __init__(self, service: RemoteService) -> None:
        self._service = service

    def log_probs(self, batch: Any, *, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of every counted token under the base model."""
        service, texts, sampler = self._service, texts_of(batch), self._service.reference()
        make = service.tinker.ModelInput.from_ints
        sent = [sampler.compute_logprobs(make(text.tokens)) for text in texts]
        found = [service.call("asking the base model", future.result) for future in sent]
        return place(batch, texts, [torch.tensor([float(one) for one in row[1:]]) for row in found])


def place(batch: Any, texts: Sequence[Text], found: Sequence[Tensor]) -> Tensor:
    """Return the numbers of texts where their tokens stand, (B, T) and zero where none counts."""
    ids_BT = batch["input_ids"]
    placed_BT = torch.zeros(ids_BT.shape, dtype=torch.float32, device=ids_BT.device)
    for text, row in zip(texts, found, strict=True):
        placed_BT[text.row, text.places_N] = torch.where(text.counted_N, row.to(placed_BT), 0.0)
    return placed_BT


def inputs_at(texts: Sequence[Text], **fields: Tensor) -> list[Mapping[str, Tensor]]:
    """Return for each text what a loss needs: the fields (B, T) where its tokens stand, zero where none counts."""
    return [
        text.inputs
        | {name: torch.where(text.counted_N, value[text.row, text.places_N], 0.0) for name, value in fields.items()}
        for text in texts
    ]
