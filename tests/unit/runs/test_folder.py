"""Every checkpoint is one kind of folder: stored ones still load, and files of others must be whole too."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from etude.runs.checkpoint import read_checkpoint
from etude.runs.folder import entries, fill, publish, stage
from etude.runs.manifest import DamagedCheckpointError

LISTED = {"model.safetensors", "optimizer.safetensors", "state.json"}


def as_stored(directory: Path, schema: int, info: dict[str, Any]) -> Path:
    """Write a checkpoint by hand, as versions before have written theirs: in this format forever."""
    directory.mkdir()
    save_file({"weight": torch.arange(3.0)}, directory / "model.safetensors")
    save_file({"state.0.exp_avg": torch.ones(3)}, directory / "optimizer.safetensors")
    tree = {"optimizer": {"state": {"0": {"exp_avg": {"$tensor": "state.0.exp_avg"}}}}, "order": {"version": 1}}
    (directory / "state.json").write_text(json.dumps({"tree": tree}))
    kind, hashed = ("sha256", hashlib.sha256) if schema == 1 else ("xxh3_128", xxhash.xxh3_128)
    content = {name: (directory / name).read_bytes() for name in sorted(LISTED)}
    files = {name: {kind: hashed(data).hexdigest(), "size_bytes": len(data)} for name, data in content.items()}
    body = {"schema_version": schema, "step": 30, "metric": 0.5, "info": info, "files": files}
    seal = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps({"body": body, "sha256": seal}, indent=1) + "\n")
    return directory


WORDS = b"a\nb\n"
OTHERS = {
    1: [hashlib.sha256(WORDS).hexdigest(), len(WORDS)],
    2: {"xxh3_128": xxhash.xxh3_128(WORDS).hexdigest(), "size_bytes": len(WORDS)},
}


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("name, info", [("step-00000030", {"epoch": 1.5}), ("checkpoint-30", {"others": {}})])
def test_stored_checkpoints_load(name: str, info: dict[str, Any], schema: int, tmp_path: Path) -> None:
    found = read_checkpoint(as_stored(tmp_path / name, schema, info))
    assert (found.step, found.metric) == (30, 0.5)
    assert torch.equal(found.tree["optimizer"]["state"]["0"]["exp_avg"], torch.ones(3))
    assert found.info == ({} if "others" in info else info)


@pytest.mark.parametrize("schema", [1, 2])
def test_files_that_nobody_here_reads_are_verified(schema: int, tmp_path: Path) -> None:
    path = as_stored(tmp_path / "checkpoint-30", schema, {"others": {"adapter/words.txt": OTHERS[schema]}})
    with pytest.raises(DamagedCheckpointError, match=r"words\.txt is missing"):
        read_checkpoint(path)
    (path / "adapter").mkdir()
    (path / "adapter" / "words.txt").write_bytes(WORDS)
    assert read_checkpoint(path).step == 30
    (path / "adapter" / "words.txt").write_bytes(WORDS[::-1])
    with pytest.raises(DamagedCheckpointError, match=r"words\.txt is damaged: its hash differs"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["../words.txt", "/words.txt"])
def test_a_manifest_names_nothing_outside(name: str, tmp_path: Path) -> None:
    path = as_stored(tmp_path / "checkpoint-30", 2, {"others": {name: OTHERS[2]}})
    with pytest.raises(DamagedCheckpointError, match="only files inside"):
        read_checkpoint(path)


def test_a_folder_of_another_library_is_completed_and_put_in_place(tmp_path: Path) -> None:
    for value in (1, 2):  # the second in place of the first
        temp = tmp_path / ".tmp-new"
        (temp / "adapter" / "deep").mkdir(parents=True)
        (temp / "adapter" / "deep" / "words.txt").write_bytes(WORDS)
        save_file({"weight": torch.full((2,), float(value))}, temp / "model.safetensors")
        fill(temp, stage({"optimizer": {"rate": value}}, {}), 7, None, {})
        publish(temp, tmp_path / "checkpoint-7")
    assert entries(tmp_path) == []
    assert entries(tmp_path, "checkpoint-") == [(7, tmp_path / "checkpoint-7")]
    assert read_checkpoint(tmp_path / "checkpoint-7").tree == {"optimizer": {"rate": 2}}
    body = json.loads((tmp_path / "checkpoint-7" / "manifest.json").read_text())["body"]
    assert set(body["files"]) == {"model.safetensors", "state.json"}
    assert set(body["info"]["others"]) == {"adapter/deep/words.txt"}


def test_a_folder_under_the_name_of_another_step_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="belongs to step 30"):
        read_checkpoint(as_stored(tmp_path / "checkpoint-31", 2, {}))
