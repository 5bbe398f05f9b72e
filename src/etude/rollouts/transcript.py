"""What one rollout of an agent asked for and got, token by token.

Tokens are kept as they were sampled. A prompt that goes on from an earlier reply gets its tokens from there, and only
what is new in it is encoded; turns whose tokens go on from another turn's make one trajectory with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.data.text import encode_continuation
from etude.errors import ConfigError, DataError
from etude.rollouts.conversation import add_completion, begin, hear
from etude.rollouts.llm import Prompt, Request
from etude.rollouts.tasks import Task
from etude.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class _Said:
    """A reply, and what had been said before it."""

    text: str
    """Prompt and reply as an agent sees them; empty for prompts that were given as tokens."""
    tokens: list[int]
    """Of prompt and reply."""
    has_reply: bool
    """Whether the reply has any text; if not, the same prompt again is asked for once more, and does not go on."""
    tail: str
    """What was sampled after the text of the reply: a stop text, an end token."""
    stops: tuple[str, ...]


class Transcript:
    """The turns of one rollout."""

    def __init__(self, task: Task, key: int, *, group_id: str, run_id: int) -> None:
        self.task, self.key, self.group_id, self.run_id = task, key, group_id, run_id
        self._said: list[_Said] = []
        self.trajectories: list[Trajectory] = []
        """In the order in which they began."""
        self.trained: list[int] = []
        """For each turn that is learned from the number of its trajectory."""

    def encode(self, policy: Any, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, which are those of an earlier turn as far as it goes on from one."""
        if not prompt:
            raise DataError("the agent asks with an empty prompt")
        if _is_tokens(prompt):
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        text = render(policy, prompt)
        before = [
            said for said in self._said
            if said.text and text.startswith(said.text) and (said.has_reply or text != said.text)
        ]  # fmt: skip
        if not before:
            return encode_prompt(policy, prompt)  # type: ignore[arg-type]  # no tokens
        last = max(before, key=lambda said: len(said.text))
        rest = text[len(last.text) :]
        for end in (last.tail, *(stop for stop in last.stops if last.tail.startswith(stop))):
            if end and rest.startswith(end):
                rest = rest[len(end) :]
                break
        return last.tokens + (encode_continuation(policy, rest) if rest else [])

    def add(self, policy: Any, request: Request, prompt: Sequence[int], completion: Any) -> None:
        """Note the reply to a request."""
        tokens = [*prompt, *completion.tokens]
        text = "" if _is_tokens(request.prompt) else render(policy, request.prompt) + completion.text
        tail = _after(policy, completion) if text else ""
        self._said.append(_Said(text, tokens, bool(completion.text), tail, request.sampling.stop))
        if not request.is_trained:
            return
        number = self._continued(prompt)
        if number is None:
            fresh = begin(self.task, prompt, self.key, group_id=self.group_id, run_id=self.run_id)
            self.trajectories.append(fresh)
            number = len(self.trajectories) - 1
        one = self.trajectories[number]
        hear(one, prompt[len(one.tokens) :])
        add_completion(one, completion)
        self.trained.append(number)

    def _continued(self, prompt: Sequence[int]) -> int | None:
        """Return the number of the longest trajectory that a prompt goes on from."""
        prompt, found = list(prompt), None
        for number, one in enumerate(self.trajectories):
            longer = found is None or len(one.tokens) > len(self.trajectories[found].tokens)
            if longer and prompt[: len(one.tokens)] == one.tokens:
                found = number
        return found


def encode_prompt(policy: Any, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Return the tokens of a text or of chat messages."""
    tokens: list[int] = policy.encode(prompt) if isinstance(prompt, str) else _templated(policy.encode_chat, prompt)
    return tokens


def render(policy: Any, prompt: Any) -> str:
    """Return a prompt as the text that the model reads."""
    if isinstance(prompt, str):
        return prompt
    template = policy.tokenizer.apply_chat_template
    text: str = _templated(template, prompt, tokenize=False, add_generation_prompt=True)
    return text


def _templated(make: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> Any:
    try:
        return make([dict(message) for message in messages], **options)
    except ValueError as error:  # transformers says at length that there is none
        if "chat_template" not in str(error) and "chat template" not in str(error):
            raise
        raise ConfigError(
            "the prompts are chat messages, but the model's tokenizer has no chat template; give texts instead"
        ) from None


def _is_tokens(prompt: Any) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and not isinstance(prompt[0], Mapping)


def _after(policy: Any, completion: Any) -> str:
    """Return what was sampled after the text of a completion, special tokens included."""
    whole: str = policy.tokenizer.decode(list(completion.tokens), skip_special_tokens=False)
    return whole[len(completion.text) :] if whole.startswith(completion.text) else ""
