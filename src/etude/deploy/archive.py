"""torch.export archives without pickle: what is written holds none, and what holds one is not read.

`torch.export.load` unpickles parts of an archive where the archive asks for it, parses its expressions as Python, and
imports the modules its tree specs name. An archive of ours needs none of that, so anything that could lead there is
refused before torch sees it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from etude.errors import CheckpointError

MODEL, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
CONFIGS = {
    "data/weights/model_weights_config.json": "weight_",
    "data/constants/model_constants_config.json": "tensor_",
}
_KNOWN = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_format|archive_version|byteorder"
    r"|\.data/version|\.data/serialization_id"
)
_CODE_KEYS = {"expr_str", "as_expr", "as_custom_obj", "as_operator", "as_graph", "graph_module_name"}
_EMPTY_KEYS = ("range_constraints", "guards_code")
_TREE_TYPES = {"builtins.tuple", "builtins.list", "builtins.dict", None}


def write_archive(program: torch.export.ExportedProgram) -> bytes:
    """Return the archive of a program without its example inputs, the one part that is a pickle.

    It is made in memory: where a disk is full, torch's own writer ends the process.
    """
    program.example_inputs = None
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def read_archive(path: Path, content: bytes) -> torch.nn.Module:
    """Return the module of an archive that holds nothing but a static graph and plain tensors."""
    try:
        files = _files(content)
        _check(files)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no archive that Etude exported: {error}") from None
    # Packed anew from what was checked, so that no second way to read the same zip file can show torch another one.
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, part in files.items():
            archive.writestr(f"policy/{name}", part)
    packed.seek(0)
    module: torch.nn.Module = torch.export.load(packed).module()
    return module


def _files(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        if len(set(names)) != len(names):
            raise ValueError("a name occurs twice in it")
        return {name: archive.read(full) for name, full in zip(names, archive.namelist(), strict=True)}


def _check(files: dict[str, bytes]) -> None:
    fixed = {MODEL, INPUTS, *CONFIGS}
    if unknown := [name for name in files if name not in fixed and not _KNOWN.fullmatch(name)]:
        raise ValueError(f"it holds {unknown[0]!r}")
    if files[INPUTS]:
        raise ValueError("it holds pickled example inputs")
    for name, prefix in CONFIGS.items():
        for key, payload in json.loads(files[name])["config"].items():
            if payload["use_pickle"] is not False or not re.fullmatch(rf"{prefix}\d+", payload["path_name"]):
                raise ValueError(f"{key!r} in it is pickled")
    model = json.loads(files[MODEL])
    if any(model.get(key) for key in _EMPTY_KEYS):
        raise ValueError("its graph is not static")
    for key, value in _pairs(model):
        if key in _CODE_KEYS and value is not None:
            raise ValueError(f"its graph holds {key!r}")
        if key in ("in_spec", "out_spec"):
            _check_tree(json.loads(value))


def _check_tree(spec: Any) -> None:
    for key, value in _pairs(spec):
        if key == "type" and value not in _TREE_TYPES:
            raise ValueError(f"its inputs hold a {value!r}")


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of every map in a JSON value, with what it leads to."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _pairs(item)
    elif isinstance(value, list):
        for item in value:
            yield from _pairs(item)
