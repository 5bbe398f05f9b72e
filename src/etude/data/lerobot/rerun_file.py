"""A dataset as a file for the Rerun viewer: numbers, videos and notes on one time axis, episode after episode."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.video import cut_video
from etude.data.lerobot.viewed import ViewedDataset
from etude.errors import DataError, MissingExtraError
from etude.runs.durable import in_use, require_place, temp_name

Array = NDArray[Any]


def import_rerun() -> Any:
    """Import the Rerun library; say what to install if it is absent."""
    try:
        return import_module("rerun")
    except ImportError as error:
        raise MissingExtraError("files for the Rerun viewer need its library; run: pip install rerun-sdk") from error


def write_rerun(
    dataset: ViewedDataset,
    episodes: Sequence[int] | None,
    target: Path,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write episodes as one recording, and return in words what could not be written.

    Args:
        dataset: What is written.
        episodes: Which ones; None means all, one after the other.
        target: A file that ends in `.rrd`.
        advance: Called with how many episodes of how many are done.
    """
    rerun = import_rerun()
    chosen = list(range(len(dataset))) if episodes is None else list(episodes)
    if wrong := [number for number in chosen if not 0 <= number < len(dataset)]:
        raise DataError(f"{dataset.root}: there is no episode {wrong[0]}; there are 0 to {len(dataset) - 1}")
    require_place(target)
    with in_use(target.parent / temp_name(target.name)) as temp:
        stream = rerun.RecordingStream("etude-data", recording_id=f"{dataset.name}-{len(chosen)}-{chosen[0]}")
        stream.save(temp)
        notes = _RerunWriter(rerun, stream, dataset).write(chosen, advance)
        stream.flush()
        stream.disconnect()
        os.replace(temp, target)
    return notes


class _RerunWriter:
    """Sends episodes to one recording."""

    def __init__(self, rerun: Any, stream: Any, dataset: ViewedDataset) -> None:
        self._rerun, self._stream, self._dataset = rerun, stream, dataset
        self._marks = dataset.survey().marks
        self._videos: dict[Path, str] = {}
        self._notes: list[str] = []

    def write(self, chosen: Sequence[int], advance: Callable[[int, int], None]) -> list[str]:
        """Send all that there is of each episode."""
        self._stream.send_recording_name(self._dataset.name)
        for name, labels in self._dataset.labels.items():
            if any(labels):
                self._stream.log(self._path(name), self._rerun.SeriesLines(names=list(labels)), static=True)
        begin_s = 0.0
        for done, episode in enumerate(chosen, 1):
            self._episode(episode, begin_s, is_alone=len(chosen) == 1)
            begin_s += float(self._dataset.episodes.lengths[episode]) / self._dataset.fps
            advance(done, len(chosen))
        return list(dict.fromkeys(self._notes))

    def _path(self, *parts: str) -> str:
        return "/".join(self._rerun.escape_entity_path_part(part) for part in parts)

    def _episode(self, episode: int, begin_s: float, *, is_alone: bool) -> None:
        dataset, rerun = self._dataset, self._rerun
        first, count = int(dataset.episodes.starts[episode]), int(dataset.episodes.lengths[episode])
        frames = np.arange(count)
        times = [
            rerun.TimeColumn("time", duration=begin_s + frames / dataset.fps),
            rerun.TimeColumn("frame", sequence=first + frames),
            rerun.TimeColumn("episode", sequence=np.full(count, episode)),
        ]
        for name in dataset.columns:
            values = np.asarray(dataset.values(name, episode), dtype=np.float64)
            columns = rerun.Scalars.columns(scalars=values.reshape(-1)).partition([values.shape[1]] * count)
            self._stream.send_columns(self._path(name), times, columns)
        for camera, feature in dataset.info.cameras.items():
            try:
                send = self._video if feature.dtype == "video" else self._pictures
                send(camera, episode, times, is_alone)
            except DataError as error:
                self._notes.append(f"left out: {error}")
        said = [(0, f"episode {episode}: {dataset.task_text(dataset.tasks[episode])}", "INFO")]
        said += [(mark.frame or 0, mark.text, "WARN") for mark in self._marks.get(episode, ())]
        for frame, text, level in sorted(said):
            self._stream.set_time("time", duration=begin_s + frame / dataset.fps)
            self._stream.set_time("frame", sequence=first + frame)
            self._stream.set_time("episode", sequence=episode)
            self._stream.log("notes", rerun.TextLog(text, level=level))

    def _video(self, camera: str, episode: int, times: Sequence[Any], is_alone: bool) -> None:
        rerun, dataset = self._rerun, self._dataset
        path, begin_s = dataset.video_of(camera, episode)
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        count = int(dataset.episodes.lengths[episode])
        if is_alone:
            # Half a frame before the end, so that the first picture of the next episode stays out.
            data, begin_s = cut_video(path, begin_s, begin_s + (count - 0.5) / dataset.fps)
            asset = rerun.AssetVideo(contents=data, media_type="video/mp4")
        if path not in self._videos:
            self._videos[path] = self._path("videos", camera, str(len(self._videos)))
            self._stream.log(self._videos[path], asset if is_alone else rerun.AssetVideo(path=path), static=True)
        # A tenth of a frame later: a time that is rounded down would show the picture before.
        nanoseconds = np.round((begin_s + (np.arange(count) + 0.1) / dataset.fps) * 1e9).astype(np.int64)
        columns = rerun.VideoFrameReference.columns(
            timestamp=[rerun.components.VideoTimestamp(nanoseconds=int(one)) for one in nanoseconds],
            video_reference=[self._videos[path]] * count,
        )
        self._stream.send_columns(self._path(camera), times, columns)

    def _pictures(self, camera: str, episode: int, times: Sequence[Any], is_alone: bool) -> None:
        found = self._dataset.pictures(camera, episode)
        columns = self._rerun.EncodedImage.columns(blob=[np.frombuffer(one, dtype=np.uint8) for one in found])
        self._stream.send_columns(self._path(camera), times, columns)
