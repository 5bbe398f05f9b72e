"""Checks that run before the first step; every fault names the episode and the frame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.episodes import Episodes
from etude.data.lerobot.layout import BOOKKEEPING, Info
from etude.errors import DataError

Array = NDArray[Any]

MANIFEST_PATH: Final = "meta/etude.json"
_TIMESTAMP_SHARE: Final = 0.1
_CHUNK_ROWS: Final = 1 << 16


def default_tolerance_s(fps: float) -> float:
    """Return how far a timestamp may be off: a tenth of a frame, so that a dropped frame is always noticed."""
    return _TIMESTAMP_SHARE / fps


def put_in_order(columns: dict[str, Array], episodes: Episodes, root: Path) -> tuple[dict[str, Array], Array]:
    """Sort rows by episode and frame, and check that each episode is all there; return the order too."""
    frame, episode = columns["frame_index"], columns["episode_index"]
    rows, promised = len(episode), int(episodes.ends[-1])
    if rows != promised:
        raise DataError(_miscounted(columns, episodes, root))
    order = np.lexsort((frame, episode))
    if not np.array_equal(order, np.arange(rows)):
        columns = {name: values[order] for name, values in columns.items()}
    expected = np.repeat(np.arange(len(episodes)), episodes.lengths)
    if (columns["episode_index"] != expected).any():
        raise DataError(_miscounted(columns, episodes, root))
    return columns, order


def _miscounted(columns: Mapping[str, Array], episodes: Episodes, root: Path) -> str:
    found = columns["episode_index"]
    inside = found[(found >= 0) & (found < len(episodes))]
    counts = np.bincount(inside, minlength=len(episodes))
    wrong = np.flatnonzero(counts != episodes.lengths)
    if not wrong.size:
        return f"{root}: the data has {len(found)} rows, but the episodes have {episodes.ends[-1]} frames"
    number = int(wrong[0])
    return (
        f"{root}: episode {number} should have {episodes.lengths[number]} frames, but the data has {counts[number]}; "
        "the files do not belong together, or one is damaged"
    )


def check_columns(
    columns: Mapping[str, Array], info: Info, episodes: Episodes, tasks: Sequence[str], tolerance_s: float
) -> None:
    """Check order, time, tasks and numbers of all frames."""
    starts = np.repeat(episodes.starts, episodes.lengths)
    rows = np.arange(len(starts))
    for name, expected in (("frame_index", rows - starts), ("index", rows)):
        wrong = columns[name] != expected
        if wrong.any():
            row = int(wrong.argmax())
            found = f"{name} is {columns[name][row]}, expected {expected[row]}"
            raise DataError(f"{_place(info, episodes, row)}: {found}; frames are out of order")
    _check_time(columns["timestamp"], rows - starts, info, episodes, tolerance_s)
    task = columns["task_index"]
    unknown = (task < 0) | (task >= len(tasks))
    if unknown.any():
        row = int(unknown.argmax())
        raise DataError(f"{_place(info, episodes, row)}: task_index is {task[row]}, but there are {len(tasks)} tasks")
    for name, values in columns.items():
        if name not in BOOKKEEPING and values.dtype.kind == "f":
            _check_finite(name, values, info, episodes)


def _check_time(stamps: Array, frames: Array, info: Info, episodes: Episodes, tolerance_s: float) -> None:
    # Stored in float32: at 1000 s neighbours are 6e-5 s apart, so the tolerance grows with time.
    drift = np.abs(stamps.astype(np.float64) - frames / info.fps)
    allowed = tolerance_s + np.abs(stamps) * 2.0**-22
    wrong = ~(drift <= allowed)
    if not wrong.any():
        return
    row = int(wrong.argmax())
    found = f"timestamp {stamps[row]:.4f} s" + (f" after {stamps[row - 1]:.4f} s" if frames[row] else "")
    raise DataError(
        f"{_place(info, episodes, row)}: {found}, expected {frames[row] / info.fps:.4f} s at {info.fps:g} a second; "
        f"a frame is missing or fps is wrong (tolerance_s is {tolerance_s:g})"
    )


def _check_finite(name: str, values: Array, info: Info, episodes: Episodes) -> None:
    for first in range(0, len(values), _CHUNK_ROWS):
        part = values[first : first + _CHUNK_ROWS].reshape(-1, int(np.prod(values.shape[1:], dtype=np.int64)))
        bad = ~np.isfinite(part).all(1)
        if bad.any():
            row = int(bad.argmax())
            where = int((~np.isfinite(part[row])).argmax())
            what = "NaN" if np.isnan(part[row, where]) else "infinite"
            place = _place(info, episodes, first + row)
            raise DataError(f"{place}: {name!r} is {what} in dimension {where}; mend or leave out the episode")


def _place(info: Info, episodes: Episodes, row: int) -> str:
    episode, frame = episodes.locate(row)
    return f"{info.root}: episode {episode}, frame {frame}"


def check_manifest(root: Path, hashes: Mapping[Path, str]) -> None:
    """Compare files with the hashes their writer left, if it left any: a flipped bit in a video shows nowhere else."""
    path = root / MANIFEST_PATH
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))["files"]
        entries = {root / str(name): str(value) for name, value in recorded.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: the list of hashes is damaged ({error}); delete it to do without") from error
    for file, found in hashes.items():
        if entries.get(file, found) != found:
            raise DataError(
                f"{file}: the content is not what was written; the file is damaged (if it was changed on purpose, "
                f"delete {path})"
            )
