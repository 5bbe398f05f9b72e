"""The model as agents see it: prompts in, replies out, one turn after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.errors import ConfigError
from etude.policies.language.sampling import Sampling
from etude.rollouts.coordinator import GivenUpError

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int]
"""A text, chat messages with `role` and `content`, or tokens."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said, and in which tokens."""

    text: str
    """Without special tokens, cut before a stop text."""
    tokens: list[int]
    logprobs: list[float] | None
    """Of each token; None from a server that does not tell."""
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks for."""

    prompt: Prompt
    sampling: Sampling
    is_trained: bool
    turn: int


class LLM:
    """The model, bound to one rollout: every call is a turn of it, and what is sampled is what is trained on."""

    def __init__(self, ask: Callable[[Request], Reply], sampling: Sampling, seed: int, max_turns: int) -> None:
        self._ask, self._sampling, self.max_turns = ask, sampling, max_turns
        self.seed = seed
        """For agents that draw at random: a function of (seed, step, prompt, rollout, attempt)."""
        self.turns = 0
        """Completions asked for so far."""

    @property
    def turns_left(self) -> int:
        """How many completions may still be asked for."""
        return self.max_turns - self.turns

    def complete(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] | None = None,
        train: bool = True,
    ) -> Reply:
        """Return what the model says after a prompt; the rollout ends as failed if it has no turns left.

        A prompt that begins with an earlier one and its reply goes on with the very tokens that were sampled.

        Args:
            prompt: A text as it is, chat messages for the model's template, or tokens.
            max_tokens: Tokens at most; what the data says unless given.
            temperature: Must be the data's, with which log-probabilities are computed, unless `train` is false.
            stop: Texts that end the reply; what the data says unless given.
            train: Whether to learn from this reply; if not it may be context of others.
        """
        sampling = self._sampling
        if temperature is not None and temperature != sampling.temperature:
            if train:
                raise ConfigError(
                    f"the agent asks for temperature {temperature:g} but the data draws at {sampling.temperature:g}, "
                    "with which the algorithm computes; set both to the same, or ask with train=False"
                )
            sampling = replace(sampling, temperature=temperature)
        if max_tokens is not None:
            sampling = replace(sampling, max_new_tokens=int(max_tokens))
        if stop is not None:
            sampling = replace(sampling, stop=(stop,) if isinstance(stop, str) else tuple(stop))
        if self.turns_left < 1:
            raise GivenUpError(f"it asked for more than {self.max_turns} completions; raise max_turns")
        request = Request(prompt, sampling, train, self.turns)
        self.turns += 1
        return self._ask(request)

    def chat(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """Return the reply to chat messages in OpenAI's shape; `nexrl_train` has its tokens. Options as `complete`."""
        reply = self.complete(messages, **options)
        choice = {
            "index": 0, "message": {"role": "assistant", "content": reply.text}, "finish_reason": reply.finish_reason,
        }  # fmt: skip
        used = {"prompt_tokens": len(reply.prompt_tokens), "completion_tokens": len(reply.tokens)}
        return {
            "object": "chat.completion",
            "choices": [choice],
            "usage": {**used, "total_tokens": sum(used.values())},
            "nexrl_train": {
                "prompt_tokens": reply.prompt_tokens,
                "response_tokens": reply.tokens,
                "response_logprobs": reply.logprobs,
            },
        }
