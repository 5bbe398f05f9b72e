"""What the bodies of requests may say. What a body says and nobody here reads is refused, not dropped."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

MAX_TOKENS = 1 << 20
_Text = Annotated[str, Field(max_length=300)]
_Place = Annotated[int, Field(ge=0, lt=1 << 62)]
_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
_Clone = Annotated[int, Field(ge=0, lt=1 << 32)]
_Seconds = Annotated[int, Field(ge=1, le=10 * 366 * 24 * 3600)]


METADATA_BYTES = 64 << 10
METADATA_DEPTH = 32
MIN_TEMPERATURE = 1e-6


def _require_plain(given: Any) -> Any:
    """Refuse what could not be told again as JSON: numbers and characters that it has not, and depths."""
    if not _is_flat(given, METADATA_DEPTH):
        raise ValueError(f"it is nested deeper than {METADATA_DEPTH} levels")
    if len(json.dumps(given, ensure_ascii=False, allow_nan=False).encode()) > METADATA_BYTES:
        raise ValueError(f"it is larger than {METADATA_BYTES} bytes")
    return given


def _is_flat(given: Any, levels: int) -> bool:
    inner = given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    return levels >= 0 and all(_is_flat(one, levels - 1) for one in inner)


def _require_temperature(given: float) -> float:
    if 0 < given < MIN_TEMPERATURE:
        raise ValueError(f"temperatures are 0, or {MIN_TEMPERATURE:g} at least")
    return given


Metadata = Annotated[dict[str, Any], AfterValidator(_require_plain)]
"""What clients note about their own things."""
Temperature = Annotated[FiniteFloat, Field(ge=0), AfterValidator(_require_temperature)]


class Lenient(BaseModel):
    """A body that may say more than is read: what it adds is for statistics."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class Body(BaseModel):
    """A body of which every part counts."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CreateSession(Lenient):
    """Begin a session."""

    tags: list[str] = []
    user_metadata: Metadata | None = None
    display_name: str | None = None


class SessionBody(Lenient):
    """Name a session."""

    session_id: _Text


class LoraBody(Body):
    """Which weights are trained."""

    rank: int = Field(32, ge=-(1 << 31), lt=1 << 31)
    seed: _Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """Which optimizer makes the steps."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """Make a model to train."""

    session_id: _Text
    model_seq_id: _Place
    base_model: _Text
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: Optimizer = Optimizer()
    type: Literal["create_model"] = "create_model"


class Model(Body):
    """Name a model."""

    model_id: _Text
    type: str | None = None


class Adam(Body):
    """One step of Adam."""

    # Far above what is of use, and far below what float32 holds.
    learning_rate: FiniteFloat = Field(1e-4, ge=0, le=1e6)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: FiniteFloat = Field(1e-12, ge=0, le=1e6)
    weight_decay: FiniteFloat = Field(0.0, ge=0, le=1e6)
    grad_clip_norm: FiniteFloat = Field(0.0, ge=0, le=1e30)


class OptimStep(Body):
    """Make a step."""

    model_id: _Text
    adam_params: Adam
    seq_id: _Place | None = None
    type: str | None = None


class SaveWeights(Body):
    """Save weights and optimizer."""

    model_id: _Text
    path: _Text
    seq_id: _Place | None = None
    ttl_seconds: _Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str | None = None


class SaveForSampler(Body):
    """Save weights to draw from."""

    model_id: _Text
    path: _Text | None = None
    sampling_session_seq_id: _Place | None = None
    seq_id: _Place | None = None
    ttl_seconds: _Seconds | None = None
    user_metadata: dict[str, str] | None = None
    type: str | None = None


class LoadWeights(Body):
    """Load saved weights into a model."""

    model_id: _Text | None = None
    seq_id: _Place | None = None
    path: _Text
    optimizer: bool
    session_id: _Text | None = None
    model_seq_id: _Place | None = None
    base_model: _Text | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None
    type: str | None = None


class CreateSampler(Body):
    """Begin to sample."""

    session_id: _Text
    sampling_session_seq_id: _Place
    base_model: _Text | None = None
    model_path: _Text | None = None
    type: str | None = None


class Chunk(Body):
    """A part of a prompt."""

    tokens: list[_Token]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(Body):
    """What is to be gone on with."""

    chunks: list[Chunk]


class SamplingBody(Body):
    """How to draw."""

    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    seed: _Seed | None = None
    stop: str | list[_Token] | list[str] | None = None
    temperature: Temperature = 1.0
    top_k: int = Field(-1, ge=-1, lt=1 << 31)
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(Body):
    """Draw completions."""

    prompt: Prompt
    sampling_params: SamplingBody
    num_samples: int = Field(1, ge=1, le=1024)
    sampling_session_id: _Text | None = None
    seq_id: _Place | None = None
    base_model: _Text | None = None
    model_path: _Text | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=1024)
    topk_sample_logprobs: int = Field(0, ge=0, le=1024)
    prompt_logprobs_last_n: int | None = Field(None, ge=1, lt=1 << 31)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    type: str | None = None


class Retrieve(Body):
    """Fetch a result."""

    request_id: _Text
    allow_metadata_only: bool = False
    model_id: _Text | None = None


class SamplerTarget(Body):
    """The samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: _Text
    cloned_sampler_id: _Clone = 0


class RetrieveMany(Body):
    """Ask which of many results are there."""

    target: SamplerTarget
    prev_cursor: _Place = 0
    timeout: FiniteFloat | None = None
    retrieved_request_ids: list[_Text] = []


class Cancel(Body):
    """Give up a sample."""

    request_id: _Text


class SamplerName(Body):
    """Name a sampling session."""

    sampling_session_id: _Text
    type: str | None = None


class WeightsPath(Body):
    """Name saved weights."""

    tinker_path: _Text


class Ttl(Body):
    """Say how long a checkpoint is kept; None is for ever."""

    ttl_seconds: _Seconds | None = None
