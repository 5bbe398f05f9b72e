"""A system: an auditor that is trained, a target that it probes, a baseline to stay near, and a score.

Written for text, but contexts, probes and responses may be anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Scorer(ABC):
    """Says how much of something texts contain."""

    @abstractmethod
    def score(self, texts: Sequence[str]) -> Sequence[float]:
        """Return one number per text."""

    def __call__(self, texts: Sequence[str]) -> Sequence[float]:
        """Score texts."""
        return self.score(texts)


class System(ABC):
    """What samplers and algorithms ask of the models behind them; every call is batched.

    The trained model is the auditor. Its two methods may also be called `get_tester_logprobs` and
    `rollout_prompt_with_tester`, as older code has it: define either, both can be called.
    """

    _ALIASES = (
        ("get_auditor_logprobs", "get_tester_logprobs"),
        ("rollout_prompt_with_auditor", "rollout_prompt_with_tester"),
    )

    def __init__(self, scorer: Scorer | None = None) -> None:
        self.scorer = scorer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for new, old in System._ALIASES:
            has_new, has_old = (getattr(cls, name) is not getattr(System, name) for name in (new, old))
            if has_old and not has_new:
                setattr(cls, new, getattr(cls, old))
            elif has_new and not has_old:
                setattr(cls, old, getattr(cls, new))

    def get_auditor_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return log p(continuation | context) under the auditor, per token (B, T), with gradient; 0 where padded."""
        raise NotImplementedError(f"{type(self).__name__} must define get_auditor_logprobs")

    def get_tester_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return what `get_auditor_logprobs` returns."""
        raise NotImplementedError(f"{type(self).__name__} must define get_auditor_logprobs")

    @abstractmethod
    def get_target_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return log p(continuation | context) under the target, per token."""

    @abstractmethod
    def get_baseline_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return log p(continuation | context) under the baseline, per token."""

    def rollout_prompt_with_auditor(self, x: Sequence[Any]) -> Sequence[Any]:
        """Return a probe for each context, without the context."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout_prompt_with_auditor")

    def rollout_prompt_with_tester(self, x: Sequence[Any]) -> Sequence[Any]:
        """Return what `rollout_prompt_with_auditor` returns."""
        raise NotImplementedError(f"{type(self).__name__} must define rollout_prompt_with_auditor")

    @abstractmethod
    def rollout_prompt_with_target(self, x: Sequence[Any]) -> Sequence[Any]:
        """Return the target's response to each text, without the text."""

    @abstractmethod
    def advance(self, context: Any, probe: Any, response: Any) -> Any:
        """Return the context of the next turn."""

    @abstractmethod
    def reward(self, context: Sequence[Any], probe: Sequence[Any], response: Sequence[Any]) -> Sequence[float]:
        """Return the reward of each turn."""

    @abstractmethod
    def parameters(self) -> Iterator[nn.Parameter]:
        """Return what is trained."""

    # -- the same, checked ------------------------------------------------------------------------------------------

    def auditor_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return the auditor's log-probabilities, checked: they must carry a gradient while one is recorded."""
        found = self._check("auditor", self.get_auditor_logprobs(context, continuation), len(context))
        if torch.is_grad_enabled() and not found.requires_grad:
            raise ValueError("the auditor's log-probabilities carry no gradient; do not detach them")
        return found

    @torch.no_grad()
    def target_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return the target's log-probabilities, checked and without gradient."""
        return self._check("target", self.get_target_logprobs(context, continuation), len(context))

    @torch.no_grad()
    def baseline_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return the baseline's log-probabilities, checked and without gradient."""
        return self._check("baseline", self.get_baseline_logprobs(context, continuation), len(context))

    @staticmethod
    def _check(who: str, found: Any, rows: int) -> Tensor:
        if not isinstance(found, Tensor):
            raise TypeError(f"the {who}'s log-probabilities must be a tensor, got {type(found).__name__}")
        if found.dim() != 2 or found.shape[0] != rows:
            raise ValueError(
                f"the {who}'s log-probabilities must have the shape ({rows}, tokens), got {tuple(found.shape)}"
            )
        return found


class ValueFunctionSystem(System):
    """A system that also estimates what a context is worth."""

    @abstractmethod
    def value(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        """Return the value before each token of the continuation, per token (B, T), with gradient."""
