"""Between bytes and values: what clients send to train on, and what they get back, as protobuf or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from etude.errors import DataError
from etude.extras import import_extra
from etude.service.server.messages import message_class

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_TYPES: Final = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32, _BFLOAT16: np.uint16}
_NAMES: Final = {"float32": _FLOAT32, "int64": _INT64}
MAX_CELLS = 1 << 24
"""Numbers that the sparse tensors of a request may have in all: one says its size in a few bytes."""
MAX_DATUMS = 1 << 16


@dataclass(frozen=True)
class DatumRow:
    """One datum: tokens that are read, and numbers for each of them."""

    tokens: list[int]
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A forward pass, with or without a backward one."""

    model_id: str
    seq_id: int | None
    rows: list[DatumRow]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool


def canonical_json(value: Any) -> bytes:
    """Return JSON that is the same bytes for the same values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# ---- what comes in ---------------------------------------------------------------------------------------------------


def parse_message(body: bytes) -> Any:
    """Return the message of a forward and backward pass; refuse what is none."""
    message = message_class("ForwardBackwardRequest")()
    unreadable = import_extra("google.protobuf.message", "service").DecodeError
    try:
        message.ParseFromString(body)
        _read_texts(message)
    except (unreadable, RuntimeError, ValueError):
        raise DataError("the body is not a ForwardBackwardRequest in protobuf") from None
    return message


def _read_texts(message: Any) -> None:
    """Read every text of a message once: what is no UTF-8 is found when it is read."""
    texts: list[Any] = [message.model_id, message.loss_fn, *message.loss_fn_config.items()]
    texts += [value.text for _, value in message.loss_fn_config_v2.items()]
    texts += [item for datum in message.data for item in datum.loss_fn_inputs.items()]


def message_of_json(body: Mapping[str, Any], *, forward_only: bool) -> Any:
    """Return the message that says the same as the JSON of older clients."""
    message = message_class("ForwardBackwardRequest")()
    try:
        given = body["forward_input"] if "forward_input" in body else body["forward_backward_input"]
        message.model_id, message.loss_fn = body["model_id"], given["loss_fn"]
        message.forward_only = forward_only
        if body.get("seq_id") is not None:
            message.seq_id = body["seq_id"]
        for name, value in (given.get("loss_fn_config") or {}).items():
            if isinstance(value, str):
                message.loss_fn_config_v2[name].text = value
            else:
                message.loss_fn_config_v2[name].number = value
        for datum in given["data"]:
            _write_datum(message.data.add(), datum)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"the body is not a forward or backward request: {type(error).__name__}: {error}") from None
    return message


def _write_datum(message: Any, datum: Mapping[str, Any]) -> None:
    for chunk in datum["model_input"]["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            message.model_input.add().image.SetInParent()
            continue
        message.model_input.add().encoded_text.tokens = _whole_numbers(chunk["tokens"], np.int32).tobytes()
    for name, tensor in datum["loss_fn_inputs"].items():
        if tensor["dtype"] not in _NAMES:
            raise ValueError(f"dtype {tensor['dtype']!r}")
        found = message.loss_fn_inputs[name]
        found.dtype = _NAMES[tensor["dtype"]]
        with np.errstate(over="ignore"):  # what is infinite then is refused as such
            values = _whole_numbers(tensor["data"]) if found.dtype == _INT64 else np.asarray(tensor["data"], np.float32)
        found.shape.extend(tensor.get("shape") or [values.size])
        if tensor.get("sparse_crow_indices") is None:
            found.dense = values.tobytes()
            continue
        found.sparse_csr.values = values.tobytes()
        found.sparse_csr.crow_indices = _whole_numbers(tensor["sparse_crow_indices"]).tobytes()
        found.sparse_csr.col_indices = _whole_numbers(tensor["sparse_col_indices"]).tobytes()


def _whole_numbers(given: Any, kind: Any = np.int64) -> np.ndarray:
    """Return integers; NumPy would cut fractions off."""
    found = np.asarray(given)
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"whole numbers are needed, got {found.dtype}")
    return np.asarray(given, kind)


def work_of(message: Any) -> Work:
    """Return the work that a message asks for, its shapes checked."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    if not 0 < len(message.data) <= MAX_DATUMS:
        raise DataError("the request has no data" if not message.data else f"{MAX_DATUMS} datums are the most")
    _require_cells(message)
    rows = [_row_of(datum, f"datum {number}") for number, datum in enumerate(message.data)]
    seq_id = message.seq_id if message.HasField("seq_id") else None
    return Work(message.model_id, seq_id, rows, message.loss_fn, config, bool(message.forward_only))


def _require_cells(message: Any) -> None:
    """Refuse sparse tensors that say little and mean much, before any of them is written out."""
    cells = 0
    for datum in message.data:
        for tensor in datum.loss_fn_inputs.values():
            if tensor.HasField("sparse_csr"):
                cells += math.prod(max(1, size) for size in list(tensor.shape)[:2])
    if cells > MAX_CELLS:
        raise DataError(f"the sparse tensors have {cells} numbers when written out; {MAX_CELLS} are the most")


def _row_of(datum: Any, where: str) -> DatumRow:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.HasField("image") or chunk.HasField("dmel"):
            raise DataError(f"{where}: model_input has a chunk that is no text; this service trains on text alone")
        tokens += _numbers(chunk.encoded_text.tokens, np.int32, f"{where}: model_input").tolist()
    if not tokens:
        raise DataError(f"{where}: model_input has no tokens")
    inputs = {name: _tensor_of(value, f"{where}: {name}") for name, value in datum.loss_fn_inputs.items()}
    if "target_tokens" in inputs:
        _require_targets(inputs["target_tokens"], len(tokens), where)
        inputs["target_tokens"] = inputs["target_tokens"].long()
        given = datum.loss_fn_inputs["target_tokens"]
        if given.HasField("sparse_csr") and not {"weights", "mask"} & set(inputs):
            inputs["mask"] = _dense_of(given, where, listed=True)  # what is not listed is no target
    return DatumRow(tokens, inputs)


def _require_targets(targets: Tensor, length: int, where: str) -> None:
    if targets.dtype.is_floating_point:
        raise DataError(f"{where}: target_tokens must be whole numbers (int64)")
    if targets.dim() not in (1, 2) or targets.shape[0] != length or not targets.numel():
        raise DataError(
            f"{where}: target_tokens has the shape {list(targets.shape)}, but model_input has {length} tokens: "
            f"[{length}] or [{length}, K] are possible"
        )


def _numbers(data: bytes, kind: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(kind).itemsize:
        raise DataError(f"{where}: {len(data)} bytes are no whole number of {np.dtype(kind).name}")
    return np.frombuffer(data, kind)


def _tensor_of(message: Any, where: str) -> Tensor:
    if message.dtype not in _TYPES:
        raise DataError(f"{where} has the unknown dtype {message.dtype}")
    if message.HasField("sparse_csr"):
        return _dense_of(message, where)
    values = _values(message.dense, message.dtype, where)
    shape = list(message.shape) or [values.numel()]
    if len(shape) > 2:
        raise DataError(f"{where} has a shape of {len(shape)} sizes; there are [tokens] and [tokens, K]")
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != values.numel():
        raise DataError(f"{where} has {values.numel()} numbers, which do not fill the shape {shape}")
    return values.view(shape)


def _values(data: bytes, dtype: int, where: str) -> Tensor:
    found = _numbers(data, _TYPES[dtype], where)
    if dtype == _BFLOAT16:
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(found.copy())


def _dense_of(message: Any, where: str, *, listed: bool = False) -> Tensor:
    """Return a sparse tensor in full, zero where nothing is listed; or 1 where something is."""
    shape, csr = list(message.shape), message.sparse_csr
    values = _values(csr.values, message.dtype, where)
    crow, col = (_numbers(data, np.int64, where) for data in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2 or min(shape) < 1:
        raise DataError(f"{where}: a sparse tensor needs a shape [rows, columns], got {shape[:8]}")
    is_sound = (
        len(crow) == shape[0] + 1
        and len(col) == values.numel()
        and int(crow[0]) == 0
        and int(crow[-1]) == len(col)
        and bool((np.diff(crow) >= 0).all())
        and bool(((col >= 0) & (col < shape[1])).all())
    )
    if not is_sound:
        raise DataError(f"{where}: the rows and columns of the sparse tensor do not fit its shape {shape}")
    rows = torch.from_numpy(np.repeat(np.arange(shape[0]), np.diff(crow)))
    dense = torch.zeros(shape, dtype=torch.float32 if listed else values.dtype)
    dense[rows, torch.from_numpy(col.copy())] = torch.ones(len(col)) if listed else values
    return dense


# ---- what goes out ---------------------------------------------------------------------------------------------------


def training_bytes(outputs: Sequence[Mapping[str, Tensor]], metrics: Mapping[str, float]) -> bytes:
    """Return what a forward pass came to, as protobuf; datums of one width after another share a record."""
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    start = 0
    while start < len(outputs):
        trailing = outputs[start]["logprobs"].shape[1:]
        end = start
        while end < len(outputs) and outputs[end]["logprobs"].shape[1:] == trailing:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - start)
        for name in outputs[start]:
            tensors = [one[name].detach().float().contiguous().numpy() for one in outputs[start:end]]
            field = record.fields[name]
            field.data = b"".join(tensor.tobytes() for tensor in tensors)
            field.offsets = np.cumsum([0, *(tensor.nbytes for tensor in tensors)], dtype=np.int64).tobytes()
            field.dtype = _FLOAT32
            field.trailing_shape.extend(trailing)
        start = end
    found: bytes = message.SerializeToString()
    return found


def training_json(data: bytes) -> dict[str, Any]:
    """Return the same as JSON, for clients that read no protobuf."""
    message = message_class("ForwardBackwardOutput")()
    message.ParseFromString(data)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        part: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
        for name, field in record.fields.items():
            values = np.frombuffer(field.data, np.float32)
            offsets = np.frombuffer(field.offsets, np.int64) // 4
            for one, begin, end in zip(part, offsets[:-1], offsets[1:], strict=True):
                shape = [-1, *field.trailing_shape]
                shape = list(values[begin:end].reshape(shape).shape)
                one[name] = {"data": values[begin:end].tolist(), "dtype": "float32", "shape": shape}
        outputs += part
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


@dataclass(frozen=True)
class Drawn:
    """One completion and how it ended."""

    tokens: list[int]
    log_probs: list[float]
    stopped: bool
    top: tuple[np.ndarray, np.ndarray] | None = None
    """The likeliest tokens at each place and their log-probabilities (tokens, K)."""


def sample_bytes(
    drawn: Sequence[Drawn], prompt: Sequence[float] | None, top: tuple[np.ndarray, np.ndarray] | None
) -> bytes:
    """Return completions as protobuf; NaN stands where a token of the prompt has no log-probability."""
    message = message_class("SampleResponse")()
    for one in drawn:
        sequence = message.sequences.add(stop_reason=0 if one.stopped else 1)
        sequence.tokens = np.asarray(one.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(one.log_probs, np.float32).tobytes()
        if one.top is not None:
            _write_top(sequence.topk_sampled_logprobs, one.top)
    if prompt is not None:
        message.prompt_logprobs = np.asarray(prompt, np.float32).tobytes()
    if top is not None:
        _write_top(message.topk_prompt_logprobs, top)
    found: bytes = message.SerializeToString()
    return found


def _write_top(message: Any, top: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, log_probs = top
    message.token_ids, message.logprobs = tokens.astype(np.int32).tobytes(), log_probs.astype(np.float32).tobytes()
    message.length, message.k = tokens.shape


def sample_json(data: bytes) -> dict[str, Any]:
    """Return the same as JSON, for clients that read no protobuf."""
    message = message_class("SampleResponse")()
    message.ParseFromString(data)
    sequences = [
        {
            "stop_reason": "length" if one.stop_reason else "stop",
            "tokens": np.frombuffer(one.tokens, np.int32).tolist(),
            "logprobs": np.frombuffer(one.logprobs, np.float32).tolist(),
        }
        for one in message.sequences
    ]
    found: dict[str, Any] = {"sequences": sequences, "type": "sample"}
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, np.float32).tolist()
        found["prompt_logprobs"] = [None if value != value else value for value in values]
    if message.HasField("topk_prompt_logprobs"):
        top = message.topk_prompt_logprobs
        ids = np.frombuffer(top.token_ids, np.int32).reshape(top.length, top.k).tolist()
        logs = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k).tolist()
        pairs = [list(zip(row, values, strict=True)) for row, values in zip(ids, logs, strict=True)]
        found["topk_prompt_logprobs"] = [None, *pairs[1:]]
    return found
