"""Join episodes that were recorded one by one into the shared files of LeRobot v3.0, in steps that a crash cannot tear.

Existing data and video files are never changed: new episodes go to new files. `meta/info.json` comes last; until it is
written the episodes are still in `.recording/`, and the next attempt writes the same files again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.data.lerobot import layout
from etude.data.lerobot.episodes import read_episodes, read_task_texts
from etude.data.lerobot.layout import BOOKKEEPING, FeatureInfo, read_info, read_json
from etude.data.lerobot.stats import Stats, merge_stats
from etude.data.lerobot.tables import arrow, integers, read_table, stats_columns, table_bytes, tasks_table
from etude.data.lerobot.validate import MANIFEST_PATH
from etude.data.lerobot.video import describe, join_videos, make_of
from etude.errors import DataError
from etude.runs.durable import fsync_directory, hash_file, in_use, remove, temp_name, write_atomically


class StagedEpisode(NamedTuple):
    """A whole episode that is not yet part of the dataset's files."""

    directory: Path
    task: str
    length: int
    stats: Mapping[str, Stats]

    def to_json(self) -> bytes:
        """Return what `read_staged` needs."""
        stats = {name: {kind: value.tolist() for kind, value in one.items()} for name, one in self.stats.items()}
        return json.dumps({"task": self.task, "length": self.length, "stats": stats}).encode()


@dataclass
class DatasetState:
    """What is finished already."""

    episodes: int = 0
    frames: int = 0
    tasks: list[str] = field(default_factory=list)
    stats: dict[str, Stats] | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    features: list[str] = field(default_factory=list)
    last_data: tuple[int, int] | None = None
    last_videos: dict[str, tuple[int, int]] = field(default_factory=dict)
    last_meta: tuple[int, int] | None = None


def require_own_folder(root: Path) -> None:
    """Refuse a folder that holds something else than a dataset, such as a run: its files would lie among the others."""
    if not root.is_dir() or any((root / known).exists() for known in (layout.INFO_PATH, layout.RECORDING_DIR)):
        return
    ours = ("data", "videos", "images", "meta", "README.md")
    strange = sorted(path.name for path in root.iterdir() if path.name not in ours and not path.name.startswith("."))
    if strange:
        raise DataError(f"{root}: holds {strange[0]!r} and is no dataset; record into a folder of its own")


def reopen(root: Path, features: Mapping[str, FeatureInfo], fps: float) -> DatasetState:
    """Read what a dataset holds, and drop descriptions of episodes that never came to count."""
    if not (root / layout.INFO_PATH).exists():
        for leftover in ("data", "videos", "meta"):
            if any((root / leftover).rglob("*.parquet")):
                _drop_uncounted(root, 0)
        return DatasetState()
    info = read_info(root)
    if not info.is_v3:
        raise DataError(f"{root}: episodes can be added to {layout.VERSION} datasets only, this one is {info.version}")
    known = {name: (one.dtype, one.shape) for name, one in info.features.items() if name not in BOOKKEEPING}
    given = {name: (one.dtype, one.shape) for name, one in features.items()}
    if known != given:
        raise DataError(f"{root}: the dataset there has other features: {known}, not {given}")
    if info.fps != fps:
        raise DataError(f"{root}: the dataset there has {info.fps:g} frames a second, not {fps:g}")
    _drop_uncounted(root, info.total_episodes)
    episodes = read_episodes(info)
    raw_stats = read_json(root / layout.STATS_PATH, "statistics") if (root / layout.STATS_PATH).exists() else {}
    stats = {name: {kind: np.asarray(v) for kind, v in one.items()} for name, one in raw_stats.items()} or None
    return DatasetState(
        episodes=info.total_episodes,
        frames=info.total_frames,
        tasks=read_task_texts(info),
        stats=stats,
        raw=info.raw,
        features=list(known),
        last_data=_place_of(episodes.data_files),
        last_videos={key: _place_of(clips.files) for key, clips in episodes.clips.items()},
        last_meta=_place_of(episodes.meta_files),
    )


def _place_of(files: Sequence[Path]) -> tuple[int, int]:
    places = [(int(path.parent.name.split("-")[1]), int(path.stem.split("-")[1])) for path in files]
    return max(places)


def _drop_uncounted(root: Path, total: int) -> None:
    """Remove descriptions that a crash between the last two steps of a commit left; their episodes are still staged."""
    for path in sorted((root / layout.EPISODES_DIR).glob("*/*.parquet")):
        try:
            indices = integers(read_table(path, ["episode_index"]), "episode_index", path)
        except DataError:
            continue
        if len(indices) and indices.min() >= total:
            path.unlink()


def read_staged(staging: Path, state: DatasetState) -> list[StagedEpisode]:
    """Return the whole episodes that wait to be joined, in order; drop those that are joined already."""
    found: list[StagedEpisode] = []
    for directory in sorted(staging.glob("episode-*")):
        number = int(directory.name.removeprefix("episode-"))
        if number != state.episodes + len(found):
            remove(directory)  # joined already
            continue
        raw = read_json(directory / "episode.json", "the description of a recorded episode")
        try:
            stats = {name: {kind: np.asarray(v) for kind, v in one.items()} for name, one in raw["stats"].items()}
            found.append(StagedEpisode(directory, str(raw["task"]), int(raw["length"]), stats))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{directory}: the recorded episode is damaged ({error}); delete it to go on") from error
    return found


def commit_episodes(
    root: Path,
    features: Mapping[str, FeatureInfo],
    fps: float,
    robot_type: str | None,
    state: DatasetState,
    staged: Sequence[StagedEpisode],
) -> None:
    """Write the staged episodes as files of the format, then let them count."""
    videos = [name for name, one in features.items() if one.dtype == "video"]
    rows = [_row(state.episodes + number, episode) for number, episode in enumerate(staged)]
    written = list(_write_data(root, state, staged, rows))
    for key in videos:
        written += _write_videos(root, state, staged, rows, key, fps)
    first = state.frames
    for row in rows:
        row["dataset_from_index"], row["dataset_to_index"] = first, first + row["length"]
        first += row["length"]
    tasks = list(dict.fromkeys([*state.tasks, *(episode.task for episode in staged)]))
    write_atomically(_made(root / layout.TASKS_PATH), table_bytes(tasks_table(tasks)))
    known = [state.stats] if state.stats and state.stats.keys() == staged[0].stats.keys() else []
    stats = merge_stats([*known, *(episode.stats for episode in staged)])
    listed = {name: {kind: value.tolist() for kind, value in one.items()} for name, one in stats.items()}
    write_atomically(root / layout.STATS_PATH, json.dumps(listed, indent=4).encode())
    written.append(_write_meta(root, state, rows))
    _write_manifest(root, written)
    info = _info(root, features, fps, robot_type, state, videos)
    info |= {
        "total_episodes": state.episodes + len(staged),
        "total_frames": first,
        "total_tasks": len(tasks),
        "splits": {"train": f"0:{state.episodes + len(staged)}"},
    }
    write_atomically(root / layout.INFO_PATH, json.dumps(info, indent=4, ensure_ascii=False).encode())


def _row(number: int, episode: StagedEpisode) -> dict[str, Any]:
    return {
        "episode_index": number,
        "tasks": [episode.task],
        "length": episode.length,
        "dataset_from_index": 0,
        "dataset_to_index": 0,
        **stats_columns(episode.stats),
    }


def _next_place(last: tuple[int, int] | None) -> tuple[int, int]:
    if last is None:
        return 0, 0
    chunk, file = last
    return (chunk + 1, 0) if file + 1 >= layout.CHUNKS_SIZE else (chunk, file + 1)


def _groups(files: Sequence[Path], limit_mb: int) -> Iterator[list[int]]:
    """Cut episodes into files of limited size."""
    group: list[int] = []
    size = 0
    for number, file in enumerate(files):
        bytes_ = file.stat().st_size
        if group and size + bytes_ > limit_mb * 1024**2:
            yield group
            group, size = [], 0
        group.append(number)
        size += bytes_
    if group:
        yield group


def _write_data(
    root: Path, state: DatasetState, staged: Sequence[StagedEpisode], rows: Sequence[dict[str, Any]]
) -> Iterator[Path]:
    pa = arrow()
    place = state.last_data
    files = [episode.directory / "data.parquet" for episode in staged]
    for group in _groups(files, layout.DATA_FILES_SIZE_IN_MB):
        place = _next_place(place)
        target = _made(root / layout.DATA_PATH.format(chunk_index=place[0], file_index=place[1]))
        with in_use(target.parent / temp_name(target.name)) as temp:
            tables = (read_table(files[number]) for number in group)
            first = next(tables)
            with pa.parquet.ParquetWriter(
                str(temp), first.schema, compression="snappy", write_page_checksum=True
            ) as writer:
                writer.write_table(first)
                for table in tables:
                    writer.write_table(table.select(first.column_names))
            _publish(temp, target)
        for number in group:
            rows[number]["data/chunk_index"], rows[number]["data/file_index"] = place
        yield target


def _write_videos(
    root: Path, state: DatasetState, staged: Sequence[StagedEpisode], rows: Sequence[dict[str, Any]], key: str,
    fps: float,
) -> Iterator[Path]:  # fmt: skip
    files = [episode.directory / f"{key}.mp4" for episode in staged]
    place = state.last_videos.get(key)
    for group in _alike(files, _groups(files, layout.VIDEO_FILES_SIZE_IN_MB)):
        place = _next_place(place)
        target = _made(root / layout.VIDEO_PATH.format(video_key=key, chunk_index=place[0], file_index=place[1]))
        lengths = [staged[number].length for number in group]
        with in_use(target.parent / temp_name(target.name)) as temp:
            join_videos([files[number] for number in group], temp, fps, lengths)
            _publish(temp, target)
        ends = np.cumsum(lengths)
        for number, length, end in zip(group, lengths, ends.tolist(), strict=True):
            rows[number][f"videos/{key}/chunk_index"], rows[number][f"videos/{key}/file_index"] = place
            rows[number][f"videos/{key}/from_timestamp"] = (end - length) / fps
            rows[number][f"videos/{key}/to_timestamp"] = end / fps
        yield target


def _alike(files: Sequence[Path], groups: Iterable[list[int]]) -> Iterator[list[int]]:
    """Split groups where the make of the video changes: such files cannot be joined without encoding again."""
    for group in groups:
        part: list[int] = []
        make: Any = None
        for number in group:
            found = make_of(files[number])
            if part and found != make:
                yield part
                part = []
            make = found
            part.append(number)
        yield part


def _write_meta(root: Path, state: DatasetState, rows: Sequence[dict[str, Any]]) -> Path:
    pa = arrow()
    place = _next_place(state.last_meta)
    for row in rows:
        row["meta/episodes/chunk_index"], row["meta/episodes/file_index"] = place
    path = _made(root / layout.EPISODES_PATH.format(chunk_index=place[0], file_index=place[1]))
    write_atomically(path, table_bytes(pa.Table.from_pylist(list(rows))))
    return path


def _write_manifest(root: Path, written: Iterable[Path]) -> None:
    path = root / MANIFEST_PATH
    known = read_json(path, "the list of hashes").get("files", {}) if path.exists() else {}
    known |= {str(file.relative_to(root)): hash_file(file, "sha256").digest for file in written}
    write_atomically(path, json.dumps({"files": known}, indent=1).encode())


def _info(
    root: Path, features: Mapping[str, FeatureInfo], fps: float, robot_type: str | None, state: DatasetState,
    videos: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    if state.raw:
        return dict(state.raw)
    described: dict[str, Any] = {}
    for name, one in features.items():
        names = ["height", "width", "channels"] if one.is_camera else one.names
        described[name] = {"dtype": one.dtype, "shape": list(one.shape), "names": names}
        if name in videos:
            first = root / layout.VIDEO_PATH.format(video_key=name, chunk_index=0, file_index=0)
            described[name]["info"] = describe(first, fps, one.shape[2])
    for name, dtype in BOOKKEEPING.items():
        described[name] = {"dtype": dtype, "shape": [1], "names": None}
    return {
        "codebase_version": layout.VERSION,
        "robot_type": robot_type,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": layout.CHUNKS_SIZE,
        "data_files_size_in_mb": layout.DATA_FILES_SIZE_IN_MB,
        "video_files_size_in_mb": layout.VIDEO_FILES_SIZE_IN_MB,
        "fps": int(fps) if float(fps).is_integer() else fps,
        "splits": {},
        "data_path": layout.DATA_PATH,
        "video_path": layout.VIDEO_PATH if videos else None,
        "features": described,
    }


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _publish(temp: Path, target: Path) -> None:
    with temp.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temp, target)
    fsync_directory(target.parent)
