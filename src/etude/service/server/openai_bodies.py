"""What the OpenAI client may ask for. What it asks for and nobody here can do is refused, not dropped."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, WrapValidator, model_validator

from etude.service.server.bodies import MAX_TOKENS, Body, Temperature, _Text, _Token

MAX_PROMPTS: Final = 256
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
_Stops = Annotated[
    list[_Stop], Field(max_length=16), BeforeValidator(lambda one: [one] if isinstance(one, str) else one)
]


def _one_reason(given: Any, read: Any) -> Any:
    """Read a prompt; say in one sentence what it may be, and not once for every form that it does not have."""
    try:
        return read(given)
    except ValidationError:
        raise ValueError("a prompt is a text or a list of tokens, none negative, or a list of such prompts") from None


_Prompt = Annotated[
    str | Annotated[list[str] | list[_Token] | list[list[_Token]], Field(min_length=1)], WrapValidator(_one_reason)
]
NOT_OFFERED: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": (), "functions": ([],),
    "logit_bias": ({},), "metadata": ({},), "modalities": (["text"],), "parallel_tool_calls": (), "prediction": (),
    "presence_penalty": (0,), "reasoning_effort": (), "response_format": ({"type": "text"},), "service_tier": ("auto",),
    "store": (False,), "suffix": ("",), "tool_choice": ("none",), "tools": ([],), "web_search_options": (),
}  # fmt: skip
"""Parts of the protocol that this service lacks, each with what may be said all the same: nothing follows from it."""


class StreamOptions(Body):
    """What to send beside the pieces."""

    include_usage: bool = False


class DrawingBody(Body):
    """How to draw, in either call."""

    model: _Text
    n: int = Field(1, ge=1, le=128)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: _Stops = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = True
    user: _Text | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_what_is_not_offered(cls, given: Any) -> Any:
        """Refuse, by name, what the protocol has and this service has not; None is always the usual."""
        if not isinstance(given, dict):
            return given
        for name, neutral in NOT_OFFERED.items():
            if given.get(name) is not None and given[name] not in neutral:
                raise ValueError(f"this service does not offer {name}; leave it out")
        return {name: value for name, value in given.items() if name not in NOT_OFFERED and value is not None}


class Complete(DrawingBody):
    """Continue texts or tokens."""

    prompt: _Prompt
    max_tokens: int = Field(16, ge=1, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Body):
    """A part of what is said."""

    type: Literal["text"]
    text: str


class Message(Body):
    """What one side says."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart]
    # An answer that is sent back has these, empty.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def as_template(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        said = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": said}


class Chat(DrawingBody):
    """Answer a conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Chat:
        """Refuse likeliest tokens without log-probabilities, and two limits."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens say the same; give one")
        return self
