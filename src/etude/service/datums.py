"""What training services exchange: datums, parameters of Adam, answers; and how trajectories become datums.

The classes have the fields of the Tinker client's, and calls take its own objects as well: what is asked of them is
only these fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from etude.errors import DataError
from etude.types.trajectory import Trajectory, token_numbers


@dataclass(frozen=True)
class ModelInput:
    """Tokens that the model reads."""

    tokens: Sequence[int]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        """Make it of tokens."""
        return cls(list(tokens))

    def to_ints(self) -> list[int]:
        """Return the tokens."""
        return list(self.tokens)


@dataclass(frozen=True)
class Datum:
    """One row to train on: N tokens, and N numbers of each kind that the loss asks for."""

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any]
    """`target_tokens`, with `weights`, or `logprobs` and `advantages`; a `mask` leaves positions out altogether."""


@dataclass(frozen=True)
class AdamParams:
    """One step of Adam; every one of them is honoured."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0 does not clip."""


@dataclass(frozen=True)
class SamplingParams:
    """How to draw."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """What a loss came to."""

    loss_fn_outputs: list[dict[str, Tensor]]
    """For each datum `logprobs` and `elementwise_loss` (N)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`loss:sum`, and others by `name:reduction`."""
    loss_fn_output_type: str = "tensor"


@dataclass(frozen=True)
class OptimStepResponse:
    """What a step of the optimizer came to."""

    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedPath:
    """Where something was saved."""

    path: str


@dataclass(frozen=True)
class SampledSequence:
    """One completion."""

    tokens: list[int]
    logprobs: list[float] | None
    stop_reason: str


@dataclass(frozen=True)
class SampleResponse:
    """Completions of one prompt."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


class Future:
    """An answer that is there already, asked for as one that is not: `.result()`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """Return the answer."""
        return self._value


def tokens_of(model_input: Any) -> list[int]:
    """Return the tokens of a model input, of ours, of the Tinker client's, or of plain numbers."""
    found = model_input.to_ints() if hasattr(model_input, "to_ints") else model_input
    return [int(token) for token in found]


def numbers_of(value: Any) -> Tensor:
    """Return a tensor of what a datum holds: a tensor, a list, or the client's tensor data."""
    return torch.as_tensor(value.to_torch() if hasattr(value, "to_torch") else value)


def as_datums(trajectories: Sequence[Trajectory], *, by_advantage: bool) -> list[Datum]:
    """Return trajectories as datums: targets are the tokens from the second on, and numbers stand where theirs does."""
    found = []
    for index, one in enumerate(trajectories):
        tokens = [int(token) for token in one.tokens]
        if len(tokens) < 2:
            raise DataError(f"trajectory {index} has {len(tokens)} tokens; the first predicts, so 2 are the least")
        counted_T = torch.tensor([float(mark != 0) for mark in one.loss_mask])
        inputs: dict[str, Any] = {"target_tokens": torch.tensor(tokens[1:]), "mask": counted_T[1:]}
        if by_advantage:
            inputs["advantages"] = _advantages(one, counted_T)[1:]
            if one.get("logprobs") is not None:
                inputs["logprobs"] = _by_token("logprobs", one)[1:]
        else:
            weights = one.get("weights")
            inputs["weights"] = (counted_T if weights is None else _by_token("weights", one) * counted_T)[1:]
        found.append(Datum(ModelInput(tokens[:-1]), inputs))
    return found


def _advantages(one: Trajectory, counted_T: Tensor) -> Tensor:
    if one.get("token_advantages") is not None:
        return torch.where(counted_T != 0, _by_token("token_advantages", one), 0.0)
    return counted_T * float(one.advantage)


def _by_token(name: str, one: Trajectory) -> Tensor:
    return token_numbers(name, [one[name]], [one], len(one.tokens))[0]
