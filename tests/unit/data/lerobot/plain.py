"""Datasets of numbers alone, written from arrays: large ones in a second, and with faults that no writer lets by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.data.lerobot.layout import BOOKKEEPING, DATA_PATH, EPISODES_PATH, INFO_PATH, TASKS_PATH
from etude.data.lerobot.tables import table_bytes, tasks_table

PLACE = {"chunk_index": 0, "file_index": 0}
STATES, ACTIONS = ("x", "y", "z"), ("dx", "dy", "grip")


def smooth(episodes: int = 40, frames: int = 50, seed: int = 0) -> dict[str, Any]:
    """Make episodes as a steady hand would: a path to a goal, actions that are its steps, a gripper that closes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(frames - 5, frames + 6, episodes)
    states, actions = [], []
    for length in lengths:
        t = np.linspace(0, 1, length)[:, None]
        start, goal = rng.uniform(-1, 1, (2, 3))
        path = start + (goal - start) * (3 * t**2 - 2 * t**3) + 0.02 * np.sin(6 * t + rng.uniform(0, 6, 3))
        states.append(path)
        actions.append(np.column_stack([np.gradient(path[:, :2], axis=0) * 10, t[:, 0] > rng.uniform(0.4, 0.6)]))
    return {"lengths": lengths, "observation.state": np.concatenate(states), "action": np.concatenate(actions)}


def write_plain(
    root: Path,
    made: Mapping[str, Any],
    *,
    fps: float = 10.0,
    tasks: Sequence[str] = ("reach",),
    task_of: Sequence[int] | None = None,
    timestamps: Any = None,
    cameras: Mapping[str, Any] | None = None,
    names: bool = True,
) -> Path:
    """Write `lengths` and columns of numbers as a dataset; cameras are promised, but their files are not written."""
    import pyarrow as pa

    lengths = np.asarray(made["lengths"])
    ends, rows = np.cumsum(lengths), int(lengths.sum())
    starts = ends - lengths
    frames = np.arange(rows) - np.repeat(starts, lengths)
    task_of = np.zeros(len(lengths), dtype=np.int64) if task_of is None else np.asarray(task_of)
    columns = {name: np.asarray(values) for name, values in made.items() if name != "lengths"}
    labels = {"observation.state": list(STATES), "action": list(ACTIONS)} if names else {}
    features: dict[str, Any] = {
        name: {"dtype": str(values.dtype), "shape": [values.shape[1]], "names": labels.get(name)}
        for name, values in columns.items()
    }
    bookkeeping = {
        "timestamp": np.float32(frames / fps if timestamps is None else timestamps), "frame_index": frames,
        "episode_index": np.repeat(np.arange(len(lengths)), lengths), "index": np.arange(rows),
        "task_index": np.repeat(task_of, lengths),
    }  # fmt: skip
    features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in BOOKKEEPING.items()}
    features |= {name: {"dtype": "video", "shape": list(shape)} for name, shape in (cameras or {}).items()}
    table = {name: pa.array(values) for name, values in bookkeeping.items()}
    for name, values in columns.items():
        table[name] = (
            pa.array(values[:, 0])
            if values.shape[1] == 1
            else pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])
        )
    described = {
        "episode_index": np.arange(len(lengths)), "length": lengths, "dataset_from_index": starts,
        "dataset_to_index": ends, "data/chunk_index": np.zeros_like(lengths), "data/file_index": np.zeros_like(lengths),
    }  # fmt: skip
    for camera in cameras or {}:
        described |= {f"videos/{camera}/{name}": np.zeros_like(lengths) for name in PLACE}
        described |= {f"videos/{camera}/from_timestamp": starts / fps, f"videos/{camera}/to_timestamp": ends / fps}
    info = {
        "codebase_version": "v3.0", "fps": fps, "features": features, "total_episodes": len(lengths),
        "total_frames": rows, "total_tasks": len(tasks), "data_path": DATA_PATH, "robot_type": "toy",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }  # fmt: skip
    files = {
        DATA_PATH.format(**PLACE): table_bytes(pa.table(table)), TASKS_PATH: table_bytes(tasks_table(tasks)),
        EPISODES_PATH.format(**PLACE): table_bytes(pa.table({name: pa.array(v) for name, v in described.items()})),
        INFO_PATH: json.dumps(info).encode(),
    }  # fmt: skip
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root
