"""`LeRobotWriter`: record episodes as a LeRobot v3.0 dataset that survives a crash at any moment.

Every episode is first put aside in `.recording/` by one rename; `finalize` joins them into the files of the format, and
`meta/info.json`, written last, makes them count. Whoever opens the same root again goes on after the last whole one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.commit import StagedEpisode, commit_episodes, read_staged, reopen, require_own_folder
from etude.data.lerobot.layout import BOOKKEEPING, RECORDING_DIR, FeatureInfo, make_feature, read_json
from etude.data.lerobot.stats import PictureStats, Stats, column_stats
from etude.data.lerobot.tables import arrow, arrow_column, encode_picture, table_bytes
from etude.data.lerobot.video import Codec, VideoEncoder, pyav
from etude.errors import DataError
from etude.runs.durable import (
    fsync_directory,
    in_use,
    remove,
    remove_leftovers,
    temp_name,
    write_atomically,
    write_hashed,
)
from etude.types import Feature

Array = NDArray[Any]


class LeRobotWriter:
    """Writes episodes frame by frame; one writer at a time per dataset.

    Args:
        root: Directory of the dataset; a new one, one of this writer, or any finished LeRobot v3.0 dataset to add to.
        features: By name, `{"dtype": "float32", "shape": (14,), "names": [...]}` or an `etude.Feature`. Cameras have
            dtype "video" or "image" and shape (height, width, channels). Bookkeeping columns are added.
        fps: Frames per second.
        robot_type: What recorded them.
        codec: How videos are encoded: h264 or av1.
        images: How cameras given as `etude.Feature` are stored.
    """

    def __init__(
        self,
        root: str | Path,
        features: Mapping[str, Mapping[str, Any] | Feature],
        fps: float,
        robot_type: str | None = None,
        *,
        codec: Codec = "h264",
        images: Literal["video", "image"] = "video",
    ) -> None:
        arrow()
        self.root = Path(root)
        self.features = _describe(features, images)
        self.fps = fps
        self._codec = codec
        if any(feature.dtype == "video" for feature in self.features.values()):
            pyav()
        self._staging = self.root / RECORDING_DIR
        require_own_folder(self.root)
        self._staging.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._staging / "lock", self.root)
        try:
            remove_leftovers(self._staging)
            self._state = reopen(self.root, self.features, self.fps)
            # Columns keep the order they began with, whatever order the features are given in now.
            self.features = {name: self.features[name] for name in [*self._state.features, *self.features]}
            self._staged = read_staged(self._staging, self._state)
            self._header(robot_type)
        except BaseException:
            self._leave()
            raise
        self._episode: _Episode | None = None

    def _header(self, robot_type: str | None) -> None:
        described = {name: [feature.dtype, list(feature.shape)] for name, feature in self.features.items()}
        header = {"fps": self.fps, "features": described, "robot_type": robot_type}
        path = self._staging / "header.json"
        if path.exists() and self._staged:
            before = read_json(path, "the description of an unfinished recording")
            changed = [name for name in ("fps", "features") if before.get(name) != header[name]]
            if changed:
                raise DataError(
                    f"{self.root}: an unfinished recording there has other {' and '.join(changed)}; finish or delete it"
                )
        write_atomically(path, json.dumps(header).encode())
        self.robot_type = robot_type

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def num_episodes(self) -> int:
        """How many whole episodes there are, those of earlier recordings included."""
        return self._state.episodes + len(self._staged)

    @property
    def num_frames(self) -> int:
        """How many frames the whole episodes have."""
        return self._state.frames + sum(episode.length for episode in self._staged)

    @property
    def tasks(self) -> list[str]:
        """The tasks so far, by index."""
        return list(dict.fromkeys([*self._state.tasks, *(episode.task for episode in self._staged)]))

    @property
    def episode_length(self) -> int:
        """How many frames the episode under way has."""
        return 0 if self._episode is None else self._episode.length

    # -- recording ----------------------------------------------------------------------------------------------

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Add one frame to the episode under way: every feature, without a batch dimension; pictures uint8."""
        self._require_open()
        if self._episode is None:
            self._episode = _Episode(self._staging, self.features, self.fps, self._codec, self.num_episodes)
        self._episode.add(frame)

    def save_episode(self, task: str) -> int:
        """Put the episode under way on disk for good, and return its index."""
        self._require_open()
        if self._episode is None:
            raise DataError(
                f"{self.root}: episode {self.num_episodes} has no frames; add_frame comes before save_episode"
            )
        if not task:
            raise DataError("an episode needs its task as text, got an empty one")
        tasks = self.tasks
        task_index = tasks.index(task) if task in tasks else len(tasks)
        with _writing(self.root):
            self._staged.append(self._episode.save(task, task_index, self.num_frames))
        self._episode = None
        return self.num_episodes - 1

    def discard_episode(self) -> None:
        """Forget the frames of the episode under way."""
        if self._episode is not None:
            self._episode.drop()
            self._episode = None

    def finalize(self) -> None:
        """Write everything as LeRobot v3.0 and close; frames of an episode that was not saved are dropped."""
        self._require_open()
        self.discard_episode()
        if self._staged:
            with _writing(self.root):
                commit_episodes(self.root, self.features, self.fps, self.robot_type, self._state, self._staged)
            for episode in self._staged:
                remove(episode.directory)
            self._staged = []
        elif not self._state.episodes:
            raise DataError(f"{self.root}: nothing was recorded, so there is no dataset to finish")
        self.close()

    def close(self) -> None:
        """Stop without finishing; another writer may go on from the saved episodes."""
        self.discard_episode()
        self._leave()

    def _leave(self) -> None:
        if not any(self._staging.glob("episode-*")):
            remove(self._staging)  # nothing waits there
        self._lock.close()

    def _require_open(self) -> None:
        if self._lock.closed:
            raise DataError(f"{self.root}: this writer is closed; make a new one to add episodes")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._lock.closed:
            return
        if kind is None and self.num_episodes:
            self.finalize()
        else:
            self.close()


class _Episode:
    """The frames of one episode: numbers and PNGs in memory, videos encoded as they come."""

    def __init__(
        self, staging: Path, features: Mapping[str, FeatureInfo], fps: float, codec: Codec, number: int
    ) -> None:
        self._features, self._fps, self._number = features, fps, number
        self._target = staging / f"episode-{number:06d}"
        self._temp = staging / temp_name(self._target.name)
        self._busy = contextlib.ExitStack()
        self._busy.enter_context(in_use(self._temp))
        remove(self._temp)
        self._temp.mkdir()
        self.length = 0
        self._values: dict[str, list[Any]] = {name: [] for name, one in features.items() if one.dtype != "video"}
        self._pictures = {name: PictureStats(one.shape[2]) for name, one in features.items() if one.is_camera}
        videos = [name for name, one in features.items() if one.dtype == "video"]
        self._encoders: dict[str, VideoEncoder] = {}
        try:
            for name in videos:
                self._encoders[name] = VideoEncoder(self._temp / f"{name}.mp4", fps, features[name].shape, codec)
        except BaseException:
            self.drop()
            raise

    def add(self, frame: Mapping[str, Any]) -> None:
        """Check and take in one frame."""
        where = f"episode {self._number}, frame {self.length}"
        if missing := [name for name in self._features if name not in frame]:
            raise DataError(f"{where}: feature {missing[0]!r} is missing; the frame has {sorted(frame)}")
        if unknown := [name for name in frame if name not in self._features]:
            raise DataError(f"{where}: {unknown[0]!r} is not among the features {sorted(self._features)}")
        checked = {name: _checked(feature, frame[name], where) for name, feature in self._features.items()}
        for name, value in checked.items():
            if name in self._pictures:
                self._pictures[name].add(value)
            if name in self._encoders:
                self._encoders[name].add(value)
            else:
                self._values[name].append(encode_picture(value) if name in self._pictures else value)
        self.length += 1

    def save(self, task: str, task_index: int, first_row: int) -> StagedEpisode:
        """Write the episode aside, durably, and put it in place by one rename."""
        pa = arrow()
        for encoder in self._encoders.values():
            encoder.close()
        frames = np.arange(self.length)
        columns: dict[str, Any] = {
            name: values
            if name in self._pictures
            else np.stack(values).reshape(self.length, *self._features[name].shape)
            for name, values in self._values.items()
        }
        columns |= {
            "timestamp": (frames / self._fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(self.length, self._number),
            "index": frames + first_row,
            "task_index": np.full(self.length, task_index),
        }
        stats = {
            name: self._pictures[name].result() if name in self._pictures else _stats(columns[name])
            for name in [*self._features, *BOOKKEEPING]
        }
        kinds = {**self._features, **{name: FeatureInfo(name, dtype, (1,)) for name, dtype in BOOKKEEPING.items()}}
        table = pa.table({name: arrow_column(kinds[name], values) for name, values in columns.items()})
        write_hashed(self._temp / "data.parquet", [table_bytes(table)])
        episode = StagedEpisode(self._target, task, self.length, stats)
        write_hashed(self._temp / "episode.json", [episode.to_json()])
        for file in self._temp.glob("*.mp4"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        fsync_directory(self._temp)
        remove(self._target)
        os.rename(self._temp, self._target)
        fsync_directory(self._target.parent)
        self._busy.close()
        return episode

    def drop(self) -> None:
        """Remove what was written so far."""
        for encoder in self._encoders.values():
            encoder.close()
        self._busy.close()


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(
            f"{root}: cannot be written ({why}); saved episodes are safe, so mend that and go on"
        ) from error


def _stats(values: Array) -> Stats:
    return column_stats([(values.reshape(len(values), 1) if values.ndim == 1 else values, 1.0)])


def _describe(features: Mapping[str, Mapping[str, Any] | Feature], images: str) -> dict[str, FeatureInfo]:
    if images not in ("video", "image"):
        raise DataError(f"images must be 'video' or 'image', got {images!r}")
    found = {}
    for name, given in features.items():
        if name in BOOKKEEPING or name == "task":
            continue  # added by the writer itself
        raw: Mapping[str, Any] = given if isinstance(given, Mapping) else _raw(given, images)
        feature = make_feature(name, {**raw, "shape": list(raw.get("shape", ()))}, "features")
        if not feature.is_camera and not feature.is_numeric:
            raise DataError(f"feature {name!r} has dtype {feature.dtype!r}; use a number type, 'video' or 'image'")
        found[name] = feature
    if not found:
        raise DataError("a dataset needs at least one feature")
    return found


def _raw(feature: Feature, images: str) -> dict[str, Any]:
    names = list(feature.names) if feature.names else None
    return {"dtype": images if feature.role == "image" else feature.dtype, "shape": feature.shape, "names": names}


def _checked(feature: FeatureInfo, value: Any, where: str) -> Array:
    array = np.asarray(value)
    what = f"{where}: feature {feature.name!r}"
    if feature.is_camera:
        if array.dtype != np.uint8:
            raise DataError(f"{what} must be uint8 pixels, got {array.dtype}")
        height, width, channels = feature.shape
        if array.shape == (channels, height, width) != feature.shape:
            array = array.transpose(1, 2, 0)
    elif array.dtype.kind not in "biuf" or (feature.numpy_dtype.kind in "biu" and array.dtype.kind == "f"):
        raise DataError(f"{what} must be {feature.dtype}, got {array.dtype}")
    if array.shape != feature.shape and not (feature.shape == (1,) and array.shape == ()):
        raise DataError(f"{what} has shape {list(array.shape)}, expected {list(feature.shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{what} is NaN or infinite: {array.reshape(-1)[:8].tolist()}")
    # A copy: callers may go on to fill the same buffer with the next frame.
    return array.astype(np.uint8 if feature.is_camera else feature.numpy_dtype)


def _lock(path: Path, root: Path) -> Any:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise DataError(f"{root}: another writer is recording there") from None
    return file
