"""Windows: frames with their neighbours in time, gathered at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from etude.data import MapData, Windows
from etude.data.windows import statistics
from etude.errors import DataError
from etude.types.protocols import Place
from tests.unit.data.sources import same, taken

KEYS = np.zeros(0, dtype=np.uint64)


def windows(deltas: dict[str, list[int]] | None = None, lengths: tuple[int, ...] = (4, 1, 5)) -> Windows:
    frames = sum(lengths)
    columns = {
        "observation.state": np.arange(frames, dtype=np.float32)[:, None] + np.array([0, 0.5], dtype=np.float32),
        "action": torch.arange(frames) * 10,
        "done": np.zeros(frames, dtype=bool),
    }
    return Windows(columns, np.cumsum(lengths), deltas)


def test_frames_outside_the_episode_are_clamped_and_marked() -> None:
    batch = windows({"action": [-1, 0, 1]}).gather(np.array([0, 3, 4, 7]), KEYS)
    assert batch["action"].tolist() == [[0, 0, 10], [20, 30, 30], [40, 40, 40], [60, 70, 80]]
    assert batch["action_is_pad"].tolist() == [
        [True, False, False],
        [False, False, True],
        [True, False, True],
        [False] * 3,
    ]
    assert batch["observation.state"].tolist() == [[0, 0.5], [3, 3.5], [4, 4.5], [7, 7.5]]
    assert "observation.state_is_pad" not in batch
    assert batch["done"].dtype == torch.bool


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.lists(st.integers(-8, 8), min_size=1, max_size=5),
    st.lists(st.integers(-3, 3), min_size=1, max_size=3),
)
def test_a_gathered_window_is_what_a_loop_would_give(lengths: list[int], action: list[int], state: list[int]) -> None:
    dataset = windows({"action": action, "observation.state": state}, tuple(lengths))
    frames = np.arange(len(dataset))
    batch = dataset.gather(frames, KEYS)
    ends = np.cumsum(lengths)
    for frame in frames:
        episode = int(np.searchsorted(ends, frame, side="right"))
        first, last = int(ends[episode] - lengths[episode]), int(ends[episode] - 1)
        rows = [min(max(frame + delta, first), last) for delta in action]
        assert batch["action"][frame].tolist() == [10 * row for row in rows]
        assert batch["action_is_pad"][frame].tolist() == [not first <= frame + delta <= last for delta in action]
        single = dataset[int(frame)]
        assert sorted(single) == sorted(batch)
        assert all(torch.equal(single[name], batch[name][frame]) for name in batch)


def test_map_data_over_windows_equals_a_loader_over_them() -> None:
    dataset: Any = windows({"action": [0, 1, 2]})
    ours = taken(MapData(dataset), [0, 1], Place(batch_size=5, shuffle=False))
    assert same([step[0] for step in ours], list(DataLoader(dataset, batch_size=5)))


def test_memory_mapped_columns_serve_and_stay_on_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "action.npy", np.arange(20, dtype=np.float64).reshape(10, 2))
    mapped = np.load(tmp_path / "action.npy", mmap_mode="r")
    dataset = Windows({"action": mapped}, [6, 10], {"action": [0, 1]})
    assert dataset.gather(np.array([5]), KEYS)["action"].tolist() == [[[10, 11], [10, 11]]]
    assert dataset[5]["action"].tolist() == [[10, 11], [10, 11]]
    assert isinstance(dataset.columns["action"], np.memmap)
    assert dataset.spec["action"].dtype == "float64"


def test_the_spec_has_roles_shapes_and_statistics() -> None:
    spec = MapData(windows({"action": [0, 1]})).spec
    assert spec is not None
    state = spec["observation.state"]
    assert (state.shape, state.dtype, state.role) == ((2,), "float32", "state")
    assert (spec["action"].shape, spec["action"].role, spec["done"].role) == ((), "action", "other")
    assert state.stats is not None
    assert state.stats["mean"].tolist() == [4.5, 5.0]
    assert state.stats["min"].tolist() == [0, 0.5]
    assert state.stats["max"].tolist() == [9, 9.5]
    assert torch.allclose(state.stats["std"], torch.full((2,), float(np.std(np.arange(10)))))


def test_statistics_do_not_depend_on_chunks_and_survive_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    column = 1e6 + torch.rand(1000, 3, dtype=torch.float64)
    whole = statistics(column)
    assert torch.allclose(whole["std"], column.std(0, correction=0).float())
    monkeypatch.setattr("etude.data.windows._CHUNK_BYTES", 24 * 7)
    assert all(torch.allclose(value, whole[name]) for name, value in statistics(column).items())


@pytest.mark.parametrize(
    "columns,ends,deltas,message",
    [
        ({"a": np.zeros(3)}, [2], {}, "episode_ends must rise to the number of frames"),
        ({"a": np.zeros(3)}, [2, 2, 3], {}, "must rise"),
        ({"a": np.zeros(3)}, [], {}, "must rise"),
        ({"a": np.zeros(3)}, [3], {"b": [0]}, r"deltas name \['b'\]"),
        ({"a": np.zeros(3)}, [3], {"a": []}, "empty"),
        ({"a": np.zeros(3), "b": np.zeros(2)}, [3], {}, "equally long"),
        ({"a": np.array(["x", "y"])}, [2], {}, "only numbers"),
        ({"a": [1, 2]}, [2], {}, "must be a tensor or an array"),
        ({"a": torch.tensor(1)}, [1], {}, "no rows"),
        ({}, [1], {}, "at least one column"),
    ],
)
def test_bad_columns_are_refused_in_words(columns: Any, ends: Any, deltas: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Windows(columns, ends, deltas)
