"""A damaged checkpoint is passed over loudly; one of another history is kept under another name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from etude.errors import CheckpointError
from etude.runs.fallback import first_good, put_aside
from etude.runs.manifest import DamagedCheckpointError


@dataclass
class Saved:
    step: int


def read(path: Path) -> Saved:
    if "bad" in path.name:
        raise DamagedCheckpointError(path, "model.safetensors", "is truncated")
    return Saved(int(path.name))


def test_the_first_whole_one_is_used_in_silence() -> None:
    said: list[str] = []
    assert first_good([Path("3"), Path("bad")], read, "here", say=said.append) == Saved(3)
    assert said == []


def test_damage_is_said_and_so_is_what_is_used_instead() -> None:
    said: list[str] = []
    assert first_good([Path("bad-3"), Path("bad-2"), Path("1")], read, "here", say=said.append) == Saved(1)
    assert len(said) == 3 and "bad-3: model.safetensors is truncated; looking for an older" in said[0]
    assert said[2] == "using 1 (step 1) instead"


def test_where_none_is_whole_the_error_names_the_last_problem() -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in here can be loaded; the last problem: .*bad-2"):
        first_good([Path("bad-3"), Path("bad-2")], read, "here")
    with pytest.raises(CheckpointError, match=r"no metric in here can be loaded$"):
        first_good([], read, "here", what="no metric")


def test_what_is_put_aside_overwrites_nothing(tmp_path: Path) -> None:
    for name in ("old-a", "old-a-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "a").mkdir()
    assert put_aside(tmp_path / "a") == tmp_path / "old-a-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old-a", "old-a-1", "old-a-2"]
