"""What passes between a robot and a server: msgpack maps, with arrays as {dtype, shape, bytes}; nothing in it can run.

A request is {"type": "reset", "seed"?} or {"type": "act", "observation"}. The server greets with "hello" and answers
"reset", "action" or "error".
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.errors import DataError, EtudeError, one_line
from etude.extras import import_extra

PROTOCOL_VERSION = 1
DTYPES = frozenset(
    ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"]
)
"""Kinds of numbers that arrays may hold; all travel in little-endian order."""
MAX_DIMENSIONS = 8
_ARRAY_KEYS = {"dtype", "shape", "bytes"}


class WireError(DataError):
    """A message is not what the protocol allows."""


class ServeError(EtudeError):
    """A policy server cannot be reached, refuses, or ended the connection."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes."""
    packed: bytes = import_extra("msgpack", "sim").packb(message, default=_encode, use_bin_type=True)
    return packed


def unpack(frame: bytes | str) -> dict[str, Any]:
    """Return the message in a frame; whatever else the bytes are is a WireError."""
    if isinstance(frame, str):
        raise WireError("a text frame came; messages are binary msgpack")
    msgpack = import_extra("msgpack", "sim")
    try:
        message = msgpack.unpackb(frame, raw=False, strict_map_key=True, object_hook=_decode, ext_hook=_refuse)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"{len(frame)} bytes came that are no msgpack message: {one_line(error)}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("a message is a map with a text under 'type'")
    return message


def _encode(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.name not in DTYPES:
        raise WireError(f"a {type(value).__name__} of {array.dtype} cannot be sent; send numbers as arrays")
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "bytes": little.tobytes()}


def _decode(value: dict[Any, Any]) -> Any:
    if value.keys() != _ARRAY_KEYS:
        return value
    name, shape, content = value["dtype"], value["shape"], value["bytes"]
    if not isinstance(name, str) or name not in DTYPES:
        raise WireError(f"an array of dtype {str(name)[:40]!r} came; one of {', '.join(sorted(DTYPES))}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise WireError(f"an array of shape {str(shape)[:80]} came; a shape is a list of up to {MAX_DIMENSIONS} sizes")
    dtype = np.dtype(name)
    expected = math.prod(shape) * dtype.itemsize
    if not isinstance(content, bytes) or len(content) != expected:
        found = f"{len(content)} bytes" if isinstance(content, bytes) else type(content).__name__
        raise WireError(f"an array of {name} and shape {shape} needs {expected} bytes, {found} came")
    if name == "bool":  # a byte of 2 would be a truth value that numpy never makes
        return (np.frombuffer(content, np.uint8) != 0).reshape(shape)
    # A copy: what a frame holds is read-only, and tensors want to own what they are made of.
    return np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _refuse(code: int, _: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} came; messages hold none")


def check_key(key: str) -> str:
    """Return a key that can stand in a header and is worth guessing at."""
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ServeError("the key must have 8 or more printable ASCII characters and no space")
    return key


def key_from_environment() -> str | None:
    """Return the key in ETUDE_POLICY_KEY, which no list of processes shows."""
    return os.environ.get("ETUDE_POLICY_KEY") or None
