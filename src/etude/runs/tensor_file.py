"""Safetensors files, staged in warm memory so that saving blocks training for one memory copy and no longer.

The layout of the staging memory is the data section of the file: no copy and no serializer stands between it and
the disk, and hashing and writing go through it in chunks that release the GIL.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.errors import CheckpointError
from etude.runs.durable import CHUNK_BYTES, Hash, open_regular

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MAX_HEADER_BYTES = 100_000_000  # What the official library accepts.


class StagedFile:
    """Warm memory for the tensors of one file; reused by every save while names, types and shapes stay the same."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._layout = _layout_of(tensors)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, tensor in tensors.items():
            _require_storable(name, tensor)
        # Widest types first, as the official library does: every tensor then starts at a multiple of its item size.
        order = sorted(self._layout, key=lambda entry: (-entry[1].itemsize, entry[0]))
        spans, size_bytes = {}, 0
        for name, dtype, shape in order:
            start, size_bytes = size_bytes, size_bytes + math.prod(shape) * dtype.itemsize
            spans[name] = (start, size_bytes)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, size_bytes]}
        self._memory = _allocate(size_bytes, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        self.views = [
            self._memory[slice(*spans[name])].view(dtype).view(shape)
            if math.prod(shape)  # without any memory there is nothing to look at in another type
            else torch.empty(shape, dtype=dtype)
            for name, dtype, shape in self._layout
        ]
        """Where each tensor is to be copied, in the order given."""
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = struct.pack("<Q", len(text)) + text

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return self._memory.nbytes

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Tell whether these tensors have the names, types and shapes this memory is laid out for."""
        return self._layout == _layout_of(tensors)

    def touch(self) -> None:
        """Have the operating system provide the memory now."""
        self._memory.zero_()

    def parts(self) -> list[bytes | memoryview]:
        """Return the content of the file."""
        return [self._header, _bytes_of(self._memory)]


def copy_all(views: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into their staged places in one call, and be sure they have arrived."""
    if not views:
        return
    with torch.no_grad():
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        torch._foreach_copy_(views, tensors, non_blocking=on_device)
        if on_device:
            torch.accelerator.synchronize()


def file_parts(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the content of a file of tensors; those that share memory are each written in full."""
    staged = StagedFile(tensors)
    copy_all(staged.views, list(tensors.values()))
    return staged.parts()


def read_tensor_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, each in memory of its own; raise ValueError if it is none."""
    with open_regular(path) as file:
        return read_tensors(file)


def read_tensors(file: io.FileIO, digest: Hash | None = None) -> dict[str, Tensor]:
    """Return the tensors of an open safetensors file, and let every byte that is read pass through a hash."""
    spans, _ = _read_header(file, digest)
    tensors = {}
    for name, dtype, shape in spans:
        # Own memory per tensor, aligned by torch's allocator: some kernels round differently on other alignments.
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            _read_into(file, _bytes_of(tensor.reshape(-1).view(torch.uint8)), digest)
        tensors[name] = tensor
    return tensors


def spans_of(path: Path) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Return name, type, shape and first byte of every tensor of a safetensors file; raise ValueError if it is none."""
    with open_regular(path) as file:
        spans, at = _read_header(file, None)
    found = []
    for name, dtype, shape in spans:
        found.append((name, dtype, shape, at))
        at += math.prod(shape) * dtype.itemsize
    return found


def read_span(path: Path, at: int, dtype: torch.dtype, shape: list[int], into: Tensor | None = None) -> Tensor:
    """Return a tensor whose values begin at a byte of a file, in memory of its own or in that which is given."""
    tensor = torch.empty(shape, dtype=dtype) if into is None else into
    if tensor.numel():
        with open_regular(path) as file:
            file.seek(at)
            _read_into(file, _bytes_of(tensor.reshape(-1).view(torch.uint8)), None)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _require_storable(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(f"the tensor {name!r} is sparse, quantized or without data; save a dense one")
    if tensor.dtype not in _CODES:
        raise CheckpointError(f"the tensor {name!r} is {tensor.dtype}, which safetensors cannot hold; convert it")


def _layout_of(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _allocate(size_bytes: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    # NumPy asks the kernel for huge pages, which makes the first touch of new memory several times cheaper.
    return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8))


def _read_header(file: io.FileIO, digest: Hash | None) -> tuple[list[tuple[str, torch.dtype, list[int]]], int]:
    """Return what a file holds, in its order, and where the data begins."""
    size_bytes = os.fstat(file.fileno()).st_size
    (header_bytes,) = struct.unpack("<Q", _read_exactly(file, 8, digest))
    if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise ValueError("it does not start with a safetensors header")
    text = _read_exactly(file, header_bytes, digest)
    return _parse_header(text, size_bytes - 8 - header_bytes), 8 + header_bytes


def _parse_header(text: bytes, data_bytes: int) -> list[tuple[str, torch.dtype, list[int]]]:
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = sorted((*map(int, entry["data_offsets"]), name) for name, entry in header.items())
        spans, position = [], 0
        for start, stop, name in entries:
            dtype, shape = _DTYPES[header[name]["dtype"]], [int(length) for length in header[name]["shape"]]
            if min(shape, default=0) < 0 or start != position or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"the entry of {name!r} contradicts itself")
            spans.append((name, dtype, shape))
            position = stop
    except (LookupError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"its safetensors header is malformed ({type(error).__name__})") from None
    if position != data_bytes:
        raise ValueError(f"its header describes {position} bytes of data, the file has {data_bytes}")
    return spans


def _read_exactly(file: io.FileIO, size_bytes: int, digest: Hash | None) -> bytes:
    buffer = bytearray(size_bytes)
    _read_into(file, memoryview(buffer), digest)
    return bytes(buffer)


def _read_into(file: io.FileIO, view: memoryview, digest: Hash | None) -> None:
    while view:
        # Pieces that fit a cache are hashed while they are there.
        count = file.readinto(view[:CHUNK_BYTES])
        if not count:
            raise ValueError("it ends too early")
        if digest is not None:
            digest.update(view[:count])
        view = view[count:]
