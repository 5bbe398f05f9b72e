"""`convert`: find out what a recording is, and write it as LeRobot v3.0, going on where an earlier attempt stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from etude.data.convert import hdf5, zarrs
from etude.data.convert.recording import Recording
from etude.data.lerobot.writer import LeRobotWriter
from etude.errors import DataError
from etude.reading.suggest import did_you_mean

Format = Literal["auto", "aloha", "robomimic", "zarr"]
_OPENERS: dict[str, Callable[[Path], Recording]] = {
    "aloha": hdf5.open_aloha,
    "robomimic": hdf5.open_robomimic,
    "zarr": zarrs.open_zarr,
}


@dataclass(frozen=True)
class Converted:
    """What a conversion made."""

    root: Path
    format: str
    episodes: int
    frames: int
    fps: float
    task: str


def convert(
    source: str | Path,
    target: str | Path,
    *,
    format: Format = "auto",
    fps: float | None = None,
    task: str | None = None,
    images: Literal["video", "image"] = "video",
    codec: Literal["h264", "av1"] = "h264",
    robot_type: str | None = None,
    rename: Mapping[str, str] | None = None,
    on_episode: Callable[[int, int], None] | None = None,
) -> Converted:
    """Convert episodic HDF5 (ALOHA, robomimic) or Zarr (diffusion policy) to a LeRobot v3.0 dataset.

    Args:
        source: A file or directory.
        target: Directory of the new dataset; an interrupted conversion is continued.
        format: aloha, robomimic or zarr; auto finds out.
        fps: Frames per second; what the layout implies if None.
        task: What the episodes are for; what the layout implies if None.
        images: How pictures are stored; those with an odd height or width always become images.
        codec: How videos are encoded.
        robot_type: What recorded them.
        rename: New names of features by the ones they would have, such as those that an environment shows.
        on_episode: Called with the number of episodes done and in all.
    """
    if fps is not None and not fps > 0:
        raise DataError(f"fps must be positive, got {fps}")
    path = Path(source)
    kind = detect(path) if format == "auto" else format
    if kind not in _OPENERS:
        raise DataError(f"format {kind!r} is unknown; there are auto, {', '.join(_OPENERS)}")
    recording = _OPENERS[kind](path)
    try:
        recording = _renamed(recording, rename or {}, path)
        features = {name: dict(feature) for name, feature in recording.features.items()}
        for feature in features.values():
            if feature["dtype"] == "video" and (images == "image" or any(size % 2 for size in feature["shape"][:2])):
                feature["dtype"] = "image"
        rate, text = recording.fps if fps is None else fps, recording.task if task is None else task
        writer = LeRobotWriter(target, features, rate, robot_type, codec=codec)
        try:
            _copy(recording, writer, text, path, on_episode)
            made = Converted(Path(target), kind, writer.num_episodes, writer.num_frames, rate, text)
            writer.finalize()
        except BaseException:
            writer.close()
            raise
    finally:
        recording.close()
    return made


def _renamed(recording: Recording, names: Mapping[str, str], path: Path) -> Recording:
    known = recording.features
    for old in names:
        if old not in known:
            near = did_you_mean(old, known)
            raise DataError(f"{path}: there is no feature {old!r} to rename{near or ''} (there are {', '.join(known)})")
    after = [names.get(name, name) for name in known]
    if twice := sorted({name for name in after if after.count(name) > 1}):
        raise DataError(f"{path}: two features would be called {twice[0]!r}; choose other names")
    features = {names.get(name, name): feature for name, feature in known.items()}

    def read(number: int) -> Mapping[str, Any]:
        return {names.get(name, name): array for name, array in recording.read(number).items()}

    return replace(recording, features=features, read=read)


def detect(path: Path) -> str:
    """Return the layout of a recording."""
    if not path.exists():
        raise DataError(f"{path}: no such file or directory")
    kind = zarrs.detect(path) or hdf5.detect(path)
    if kind is None:
        raise DataError(f"{path}: neither HDF5 (ALOHA, robomimic) nor Zarr (diffusion policy); name the format")
    return kind


def _copy(
    recording: Recording, writer: LeRobotWriter, task: str, path: Path, on_episode: Callable[[int, int], None] | None
) -> None:
    if writer.num_episodes > recording.episodes:
        raise DataError(f"{writer.root}: there are more episodes already than in {path}; choose another directory")
    for number in range(writer.num_episodes, recording.episodes):
        arrays = recording.read(number)
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{path}: arrays of episode {number} differ in length: {lengths}")
        for row in range(next(iter(lengths.values()))):
            writer.add_frame({name: np.asarray(array[row]) for name, array in arrays.items()})
        writer.save_episode(task)
        if on_episode is not None:
            on_episode(number + 1, recording.episodes)
