"""What a dataset says about its episodes: how long they are, what they are for, and which files hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.layout import EPISODES_DIR, RECORDING_DIR, TASKS_PATH, FeatureInfo, Info
from etude.data.lerobot.tables import checked_tasks, integers, numbers, read_schema, read_table, read_tasks
from etude.errors import DataError

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Clips:
    """Where the episodes are in the videos of one camera."""

    files: list[Path]
    """The file of each episode."""
    from_s: NDArray[np.float64]
    """When each episode begins in its file."""


@dataclass(frozen=True)
class Episodes:
    """All episodes of a dataset, in order."""

    lengths: Integers
    tasks: list[list[str]]
    data_files: list[Path]
    """The parquet file of each episode."""
    clips: dict[str, Clips]
    meta_files: list[Path]

    @cached_property
    def ends(self) -> Integers:
        """The frame after the last of each episode, counted over the dataset."""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> Integers:
        """The first frame of each episode, counted over the dataset."""
        return self.ends - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, chosen: Iterable[int]) -> Integers:
        """Return the frames of some episodes, counted over the dataset."""
        parts = [np.arange(self.starts[number], self.ends[number]) for number in chosen]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def locate(self, row: int) -> tuple[int, int]:
        """Return episode and frame of a row, for messages."""
        episode = int(np.searchsorted(self.ends, row, side="right"))
        return episode, int(row - self.starts[episode])


def read_episodes(info: Info) -> Episodes:
    """Read and check the metadata of the episodes."""
    episodes = _read_v3(info) if info.is_v3 else _read_v2(info)
    where = info.root
    if len(episodes) != info.total_episodes:
        hint = "; its recording is not finished: open it with LeRobotWriter and call finalize()"
        unfinished = hint if (where / RECORDING_DIR).is_dir() else ""
        raise DataError(
            f"{where}: info.json counts {info.total_episodes} episodes, but {len(episodes)} are described{unfinished}"
        )
    if not len(episodes):
        raise DataError(f"{where}: the dataset has no episodes")
    if (short := np.flatnonzero(episodes.lengths <= 0)).size:
        raise DataError(f"{where}: episode {short[0]} is empty")
    if int(episodes.lengths.sum()) != info.total_frames:
        raise DataError(
            f"{where}: info.json counts {info.total_frames} frames, but the episodes have {episodes.lengths.sum()}"
        )
    return episodes


def read_task_texts(info: Info) -> list[str]:
    """Return the text of each task by its index."""
    if info.is_v3:
        tasks = read_tasks(info.root / TASKS_PATH)
    else:
        path = info.root / "meta/tasks.jsonl"
        tasks = checked_tasks(((line.get("task_index"), line.get("task")) for line in read_lines(path)), path)
    if tasks and (min(tasks) < 0 or max(tasks) > 1_000_000):
        raise DataError(f"{info.root}: tasks have indices from {min(tasks)} to {max(tasks)}, which cannot be")
    return [tasks.get(index, "") for index in range(max(tasks) + 1)] if tasks else []


def _read_v3(info: Info) -> Episodes:
    files = sorted((info.root / EPISODES_DIR).glob("*/*.parquet"))
    if not files:
        raise DataError(f"{info.root / EPISODES_DIR}: no episodes are described there; the dataset is not complete")
    tables = [_read_meta(info, path) for path in files]
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0] if name != "tasks"}
    tasks = [texts for table in tables for texts in table["tasks"]]
    order = np.argsort(joined["episode_index"], kind="stable")
    index = joined["episode_index"][order]
    if (wrong := np.flatnonzero(index != np.arange(len(index)))).size:
        raise DataError(f"{info.root / EPISODES_DIR}: episode {wrong[0]} is missing or described twice")
    joined = {name: values[order] for name, values in joined.items()}
    lengths = joined["length"]
    ends = np.cumsum(lengths)
    off = (joined["dataset_from_index"] != ends - lengths) | (joined["dataset_to_index"] != ends)
    if off.any():
        number = int(off.argmax())
        said = f"{joined['dataset_from_index'][number]} to {joined['dataset_to_index'][number]}"
        raise DataError(
            f"{info.root / EPISODES_DIR}: episode {number} is said to be frames {said}, but by lengths it is frames "
            f"{ends[number] - lengths[number]} to {ends[number]}"
        )
    places = zip(joined["data/chunk_index"].tolist(), joined["data/file_index"].tolist(), strict=True)
    clips = {key: _clips(info, key, joined) for key in info.video_keys}
    return Episodes(lengths, [tasks[i] for i in order], [info.data_file(*place) for place in places], clips, files)


def _read_meta(info: Info, path: Path) -> dict[str, Any]:
    whole = ["episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"]
    fractions = []
    for key in info.video_keys:
        whole += [f"videos/{key}/chunk_index", f"videos/{key}/file_index"]
        fractions += [f"videos/{key}/from_timestamp", f"videos/{key}/to_timestamp"]
    present, _ = read_schema(path)
    if missing := [name for name in [*whole, *fractions] if name not in present]:
        raise DataError(f"{path}: column {missing[0]!r} is missing")
    table = read_table(path, [*whole, *fractions, *(["tasks"] if "tasks" in present else [])])
    found: dict[str, Any] = {name: integers(table, name, path) for name in whole}
    found |= {name: numbers(table, FeatureInfo(name, "float64", (1,)), path)[:, 0] for name in fractions}
    texts = table.column("tasks").to_pylist() if "tasks" in present else [[]] * table.num_rows
    found["tasks"] = [[str(text) for text in (one if isinstance(one, list) else [one])] for one in texts]
    return found


def _clips(info: Info, key: str, table: dict[str, Any]) -> Clips:
    chunks, files = table[f"videos/{key}/chunk_index"], table[f"videos/{key}/file_index"]
    begin, end = table[f"videos/{key}/from_timestamp"], table[f"videos/{key}/to_timestamp"]
    place = f"{info.root / EPISODES_DIR}: camera {key!r}, episode"
    expected = table["length"] / info.fps
    tolerance = 1.5 / info.fps  # how long the last frame is shown depends on who made the file
    wrong = ~(np.isfinite(begin) & np.isfinite(end) & (begin >= 0) & (np.abs(end - begin - expected) <= tolerance))
    if wrong.any():
        number = int(wrong.argmax())
        raise DataError(
            f"{place} {number} is said to last from {begin[number]:.3f} s to {end[number]:.3f} s of its video, but has "
            f"{table['length'][number]} frames at {info.fps:g} a second"
        )
    same = (chunks[1:] == chunks[:-1]) & (files[1:] == files[:-1])
    gaps = np.where(same, np.abs(begin[1:] - end[:-1]), begin[1:])
    gaps = np.concatenate([begin[:1], gaps])
    if (gaps > tolerance).any():
        number = int((gaps > tolerance).argmax())
        raise DataError(f"{place} {number} begins at {begin[number]:.3f} s of its video, not where the one before ends")
    places = zip(chunks.tolist(), files.tolist(), strict=True)
    return Clips([info.video_file(key, *one) for one in places], begin)


def _read_v2(info: Info) -> Episodes:
    path = info.root / "meta/episodes.jsonl"
    lengths, tasks = [], []
    for number, line in enumerate(read_lines(path)):
        if line.get("episode_index") != number:
            raise DataError(f"{path}: line {number + 1} describes episode {line.get('episode_index')!r}, not {number}")
        length = line.get("length")
        if isinstance(length, bool) or not isinstance(length, int):
            raise DataError(f"{path}: episode {number} has length {length!r}, which is no whole number")
        texts = line.get("tasks", [])
        lengths.append(length)
        tasks.append([str(text) for text in (texts if isinstance(texts, list) else [texts])])
    data_files = [info.episode_data_file(number) for number in range(len(lengths))]
    clips = {
        key: Clips([info.episode_video_file(key, number) for number in range(len(lengths))], np.zeros(len(lengths)))
        for key in info.video_keys
    }
    return Episodes(np.array(lengths, dtype=np.int64), tasks, data_files, clips, [path])


def read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the objects of a file of JSON lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; the dataset is not complete") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}: line {number} must be an object")
        yield value
