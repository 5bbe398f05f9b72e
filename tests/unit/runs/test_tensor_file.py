from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from etude.errors import CheckpointError
from etude.runs.durable import hash_file, write_hashed
from etude.runs.tensor_file import _DTYPES, StagedFile, copy_all, read_tensor_file


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    staged = StagedFile(tensors)
    copy_all(staged.views, list(tensors.values()))
    record = write_hashed(path, staged.parts())
    assert record == hash_file(path)


def awkward_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32)
    tensors = {
        f"dtype.{code}": torch.randint(0, 2, (3, 5)).to(dtype) for code, dtype in _DTYPES.items() if code != "BOOL"
    }
    tensors |= {
        "bool": torch.tensor([True, False, True]),
        "zero_dim": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.reshape(4, 6).t(),
        "strided": base[::3],
        "expanded": torch.tensor([1.0]).expand(5),
        "shared.one": base,
        "shared.two": base.view(2, 12),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        'name with spaces, ü and "quotes"': torch.ones(1),
    }
    return tensors


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(left, right)


@pytest.mark.parametrize("read", [read_tensor_file, load_file], ids=["ours", "official"])
def test_all_types_layouts_and_sizes_come_back_bit_for_bit(tmp_path: Path, read: Any) -> None:
    tensors = awkward_tensors()
    write(tmp_path / "x.safetensors", tensors)
    found = read(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        assert same(found[name], tensor), name


def test_files_of_the_official_library_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor(True), "d": torch.empty(0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"who": "they"})
    found = read_tensor_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_header_says_what_the_ecosystem_expects(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"w": torch.ones(2)})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_loaded_tensors_stand_alone(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": torch.zeros(3), "b": torch.zeros(3)})
    found = read_tensor_file(tmp_path / "x.safetensors")
    found["a"].add_(1)
    assert found["b"].sum() == 0
    assert found["a"].untyped_storage().nbytes() == 12


def test_memory_is_reused_only_while_names_types_and_shapes_agree() -> None:
    staged = StagedFile({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int32)})
    assert staged.fits({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int32)})
    assert not staged.fits({"a": torch.ones(3)})
    assert not staged.fits({"a": torch.ones(1), "b": torch.ones(2, dtype=torch.int32)})
    assert not staged.fits({"a": torch.ones(3), "b": torch.ones(2)})
    assert not staged.fits({"b": torch.ones(2, dtype=torch.int32), "a": torch.ones(3)})


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.complex128)],
    ids=["sparse", "meta", "complex128"],
)
def test_tensors_without_a_place_in_the_format_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"'encoder\.w'"):
        StagedFile({"encoder.w": tensor})


def _file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HUGE = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        struct.pack("<Q", 2**63),
        _file(b"\xff\xfe"),
        _file(b"[" * 100_000),
        _file([1, 2]),
        _file({"w": 3}),
        _file({"w": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        _file({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
        _file({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        _file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        _file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"),
        _file({"w": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}, b"1234"),
        _file({"w": HUGE}),
        _file({"w": {"dtype": "F32", "shape": [2**40, 0, 2**40], "data_offsets": [0, 0]}, "v": HUGE}, b"1234"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_without_large_allocations(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="it"):
        read_tensor_file(tmp_path / "x.safetensors")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        read_tensor_file(tmp_path / "x.safetensors")
