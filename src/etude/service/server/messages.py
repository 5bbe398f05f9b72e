"""The protobuf messages of the wire, described here field by field: the server needs no package of the client.

Numbers and types are those the client sends and reads; fields that nothing here reads are left out, and protobuf skips
them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from etude.extras import import_extra

_PACKAGE = "etude_service_wire"
_KINDS: Final = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "message": 11, "bytes": 12, "uint32": 13}

# name: (number, type, how); a type with a capital is a message. How: "one" is optional, "many" repeated, "map" by name.
_MESSAGES: Final[dict[str, dict[str, tuple[int, str, str]]]] = {
    "SparseCsr": {
        "values": (1, "bytes", "one"),
        "crow_indices": (2, "bytes", "one"),
        "col_indices": (3, "bytes", "one"),
    },
    "Tensor": {
        "dense": (1, "bytes", "one"),
        "sparse_csr": (2, "SparseCsr", "one"),
        "dtype": (3, "int32", "one"),
        "shape": (4, "int64", "many"),
    },
    "EncodedText": {"tokens": (1, "bytes", "one")},
    "Other": {},
    "Chunk": {"encoded_text": (1, "EncodedText", "one"), "image": (2, "Other", "one"), "dmel": (3, "Other", "one")},
    "Datum": {"model_input": (1, "Chunk", "many"), "loss_fn_inputs": (2, "Tensor", "map")},
    "LossConfigValue": {"number": (1, "double", "one"), "text": (2, "string", "one")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string", "one"),
        "seq_id": (2, "int32", "one"),
        "data": (3, "Datum", "many"),
        "loss_fn": (4, "string", "one"),
        "loss_fn_config": (5, "double", "map"),
        "forward_only": (6, "bool", "one"),
        "loss_fn_config_v2": (7, "LossConfigValue", "map"),
    },
    "BatchedTensor": {
        "data": (1, "bytes", "one"),
        "offsets": (2, "bytes", "one"),
        "dtype": (3, "int32", "one"),
        "trailing_shape": (4, "int64", "many"),
    },
    "ArrayRecord": {
        "type_tag": (1, "string", "one"),
        "fields": (2, "BatchedTensor", "map"),
        "num_datums": (3, "int64", "one"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string", "one"),
        "loss_fn_outputs": (2, "ArrayRecord", "many"),
        "metrics": (3, "double", "map"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes", "one"),
        "logprobs": (2, "bytes", "one"),
        "k": (3, "uint32", "one"),
        "length": (4, "uint32", "one"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32", "one"),
        "tokens": (2, "bytes", "one"),
        "logprobs": (3, "bytes", "one"),
        "topk_sampled_logprobs": (4, "TopkLogprobs", "one"),
    },
    "SampleResponse": {
        "sequences": (1, "SampledSequence", "many"),
        "prompt_logprobs": (2, "bytes", "one"),
        "topk_prompt_logprobs": (3, "TopkLogprobs", "one"),
        "prompt_cache_hit_tokens": (4, "int32", "one"),
    },
}


@cache
def _pool() -> Any:
    file = import_extra("google.protobuf.descriptor_pb2", "service").FileDescriptorProto(
        name="etude_service.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, how) in fields.items():
            if how == "map":
                _add_map(message, name, field, number, kind)
            else:
                _add(message, field, number, kind, repeated=how == "many")
    pool = import_extra("google.protobuf.descriptor_pool", "service").DescriptorPool()
    pool.Add(file)
    return pool


def _add(message: Any, name: str, number: int, kind: str, *, repeated: bool = False) -> None:
    """Add a field; proto2 tells absent fields from empty ones, and reads repeated numbers packed or not."""
    field = message.field.add(name=name, number=number, label=3 if repeated else 1)
    if kind[0].isupper():
        field.type, field.type_name = _KINDS["message"], f".{_PACKAGE}.{kind}"
    else:
        field.type = _KINDS[kind]
    if repeated and kind == "int64":
        field.options.packed = True


def _add_map(message: Any, owner: str, name: str, number: int, kind: str) -> None:
    entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    _add(entry, "key", 1, "string")
    _add(entry, "value", 2, kind)
    _add(message, name, number, f"{owner}.{entry_name}", repeated=True)


@cache
def message_class(name: str) -> Any:
    """Return the class of a message."""
    factory = import_extra("google.protobuf.message_factory", "service")
    return factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))
