"""Which turn a refused call would have taken, as far as its body can be read: nobody is to wait for it."""

from __future__ import annotations

import json
import re
from typing import Any, Final

ORDERED: Final = frozenset(
    {"forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights"}
)
"""The calls that have a place in the order of a model's requests."""
_MODEL: Final = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,300})"')
_SEQ: Final = re.compile(rb'"seq_id"\s*:\s*"?(\d{1,18})\b')
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def turn_of(body: bytes, *, is_proto: bool) -> tuple[str, int] | None:
    """Return the model and the number that a body names; None if it does not name both, each once."""
    model, seq = _of_proto(body) if is_proto else _of_json(body)
    return (model, seq) if isinstance(model, str) and isinstance(seq, int) and 0 < seq < 1 << 62 else None


def _of_json(body: bytes) -> tuple[Any, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        models, numbers = set(_MODEL.findall(body)), set(_SEQ.findall(body))
        if len(models) != 1 or len(numbers) != 1:
            return None, None
        return models.pop().decode(errors="replace"), int(numbers.pop())
    if not isinstance(found, dict):
        return None, None
    seq = found.get("seq_id")
    return found.get("model_id"), int(seq) if isinstance(seq, str) and seq.isascii() and seq.isdigit() else seq


def _of_proto(body: bytes) -> tuple[Any, Any]:
    """Read fields 1 (model_id) and 2 (seq_id) of a message, as far as it can be read."""
    model: Any = None
    seq: Any = None
    at = 0
    while at < len(body):
        key, at = _varint(body, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(body, at)
            seq = value if field == 2 else seq
        elif kind == _BYTES:
            size, at = _varint(body, at)
            if field == 1 and at + size <= len(body):
                model = body[at : at + size].decode(errors="replace")
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            break
    return model, seq


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; what is cut off ends the body."""
    value = shift = 0
    while at < len(body) and shift < 64:
        value |= (body[at] & 127) << shift
        at += 1
        if body[at - 1] < 128:
            return value, at
        shift += 7
    return 0, len(body)
