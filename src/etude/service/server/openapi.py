"""What the service says of itself in OpenAPI where FastAPI cannot see it: bodies read as bytes, and refusals."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from etude.service.server.access import PROTOBUF

_NUMBERS: Final = {"type": "array", "items": {"type": "number"}}
_WHOLE: Final = {"type": "array", "items": {"type": "integer"}}
_TENSOR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["data", "dtype"],
    "properties": {
        "data": _NUMBERS, "dtype": {"enum": ["float32", "int64"]}, "shape": {**_WHOLE, "maxItems": 2},
        "sparse_crow_indices": _WHOLE, "sparse_col_indices": _WHOLE,
    },
}  # fmt: skip
_DATUM: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model_input", "loss_fn_inputs"],
    "properties": {
        "model_input": {
            "type": "object",
            "required": ["chunks"],
            "properties": {
                "chunks": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["tokens"],
                        "properties": {"type": {"const": "encoded_text"}, "tokens": _WHOLE},
                    },
                }
            },
        },
        "loss_fn_inputs": {"type": "object", "additionalProperties": _TENSOR},
    },
}
_INPUT: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["data", "loss_fn"],
    "properties": {
        "data": {"type": "array", "items": _DATUM, "minItems": 1}, "loss_fn": {"type": "string"},
        "loss_fn_config": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}  # fmt: skip
WORK: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            PROTOBUF: {"schema": {"type": "string", "format": "binary", "description": "A ForwardBackwardRequest."}},
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["model_id"],
                    "properties": {
                        "model_id": {"type": "string"}, "seq_id": {"type": "integer"}, "forward_input": _INPUT,
                        "forward_backward_input": _INPUT,
                    },
                }
            },
        },
    }
}  # fmt: skip
"""The body of a forward pass, in both of its forms."""


class Refused(BaseModel):
    """Why a request was refused."""

    detail: str


class OpenAIReason(BaseModel):
    """Why a request was refused, as the OpenAI client reads it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIRefused(BaseModel):
    """A refusal, as the OpenAI client reads it."""

    error: OpenAIReason


REFUSED: Final[dict[int | str, dict[str, Any]]] = {"4XX": {"model": Refused, "description": "Refused, and why"}}
REFUSED_OPENAI: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": OpenAIRefused, "description": "Refused, and why"}
}
