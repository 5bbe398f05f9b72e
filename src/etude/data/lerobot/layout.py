"""Where a LeRobot dataset keeps what: names of files, and `meta/info.json` as a checked object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np

from etude.errors import DataError
from etude.reading.suggest import did_you_mean

VERSION: Final = "v3.0"
VERSIONS_READ: Final = ("v3.0", "v2.1", "v2.0")
INFO_PATH: Final = "meta/info.json"
STATS_PATH: Final = "meta/stats.json"
TASKS_PATH: Final = "meta/tasks.parquet"
EPISODES_DIR: Final = "meta/episodes"
EPISODES_PATH: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATH: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
RECORDING_DIR: Final = ".recording"
"""Where a writer keeps episodes until `finalize`; its presence tells that a recording is not finished."""

CHUNKS_SIZE: Final = 1000
DATA_FILES_SIZE_IN_MB: Final = 100
VIDEO_FILES_SIZE_IN_MB: Final = 200

BOOKKEEPING: Final[dict[str, str]] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns that every dataset has, with one number a frame."""

CAMERA_DTYPES: Final = ("video", "image")
SKIPPED_DTYPES: Final = ("string", "audio")
"""What no batch can hold; such columns are left alone."""
_NUMERIC: Final = frozenset(
    {
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *map("float{}".format, (16, 32, 64)),
    }
)


@dataclass(frozen=True, slots=True)
class FeatureInfo:
    """One feature as `info.json` describes it; cameras have their shape as (height, width, channels)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_camera(self) -> bool:
        """Whether the feature holds pictures, as video or as images."""
        return self.dtype in CAMERA_DTYPES

    @property
    def is_numeric(self) -> bool:
        """Whether the feature is a column of numbers."""
        return self.dtype in _NUMERIC

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of one element on disk."""
        return np.dtype(self.dtype)

    @property
    def dimension_names(self) -> tuple[str, ...] | None:
        """Names of the dimensions of a vector, whether written as a list or as `{"motors": [...]}`."""
        names = self.names
        if isinstance(names, Mapping) and len(names) == 1:
            names = next(iter(names.values()))
        is_list = isinstance(names, list | tuple) and len(self.shape) == 1 and len(names) == self.shape[0]
        return tuple(map(str, names)) if is_list else None


@dataclass(frozen=True)
class Info:
    """`meta/info.json`, checked."""

    root: Path
    version: str
    fps: float
    features: dict[str, FeatureInfo]
    total_episodes: int
    total_frames: int
    total_tasks: int
    data_path: str
    video_path: str | None
    chunks_size: int
    robot_type: str | None
    raw: dict[str, Any] = field(repr=False)

    @property
    def is_v3(self) -> bool:
        """Whether episodes share files (v3), rather than having one each (v2)."""
        return self.version.startswith("v3")

    @property
    def cameras(self) -> dict[str, FeatureInfo]:
        """The features that hold pictures."""
        return {name: feature for name, feature in self.features.items() if feature.is_camera}

    @property
    def video_keys(self) -> list[str]:
        """Names of the features stored as video."""
        return [name for name, feature in self.features.items() if feature.dtype == "video"]

    @property
    def columns(self) -> dict[str, FeatureInfo]:
        """The features that are numbers in the parquet files; text is left out."""
        return {name: feature for name, feature in self.features.items() if feature.is_numeric}

    def data_file(self, chunk: int, file: int) -> Path:
        """Return the parquet file of a v3 dataset."""
        return self.root / _fill(self, self.data_path, "data_path", chunk_index=chunk, file_index=file)

    def episode_data_file(self, episode: int) -> Path:
        """Return the parquet file of one episode of a v2 dataset."""
        chunk = episode // self.chunks_size
        return self.root / _fill(self, self.data_path, "data_path", episode_chunk=chunk, episode_index=episode)

    def video_file(self, key: str, chunk: int, file: int) -> Path:
        """Return the mp4 of a v3 dataset."""
        template = self._video_template(key)
        return self.root / _fill(self, template, "video_path", video_key=key, chunk_index=chunk, file_index=file)

    def episode_video_file(self, key: str, episode: int) -> Path:
        """Return the mp4 of one episode of a v2 dataset."""
        template, chunk = self._video_template(key), episode // self.chunks_size
        return self.root / _fill(
            self, template, "video_path", video_key=key, episode_chunk=chunk, episode_index=episode
        )

    def _video_template(self, key: str) -> str:
        if self.video_path is None:
            raise DataError(f"{self.root / INFO_PATH}: {key!r} is a video, but 'video_path' is missing")
        return self.video_path


def _fill(info: Info, template: str, name: str, **values: Any) -> str:
    try:
        filled = template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        filled = ""
    path = Path(filled)
    if not filled or path.is_absolute() or ".." in path.parts:
        raise DataError(f"{info.root / INFO_PATH}: {name} {template!r} is not a template of a path in the dataset")
    return filled


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file; say what it is when that fails."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {what} is missing, so this is no complete LeRobot dataset") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: {what} cannot be read ({error})") from error


def read_info(root: Path) -> Info:
    """Read and check `meta/info.json`."""
    path = root / INFO_PATH
    if not root.is_dir():
        raise DataError(
            f"{root}: no such directory; give the root of a LeRobot dataset, or record it first: etude record --env "
            f"ENV --root {root} (for a preset, `etude list presets NAME` shows the whole command)"
        )
    if not path.exists() and (root / RECORDING_DIR).is_dir():
        raise DataError(
            f"{root}: the recording is not finished; go on with the command that began it, which keeps whole episodes, "
            "or open it with LeRobotWriter and call finalize()"
        )
    raw = read_json(path, "the description of the dataset")
    if not isinstance(raw, dict):
        raise DataError(f"{path}: must hold an object, got {type(raw).__name__}")
    version = raw.get("codebase_version")
    if version not in VERSIONS_READ:
        raise DataError(f"{path}: version {version!r} is not supported; there are {', '.join(VERSIONS_READ)}")
    fps = raw.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (math.isfinite(fps) and fps > 0):
        raise DataError(f"{path}: fps must be a positive number, got {fps!r}")
    template = raw.get("data_path")
    if not isinstance(template, str):
        raise DataError(f"{path}: data_path must be a template of file names, got {template!r}")
    video_path, robot_type = raw.get("video_path"), raw.get("robot_type")
    return Info(
        root=root,
        version=str(version),
        fps=float(fps),
        features=_features(raw.get("features"), path),
        total_episodes=_count(raw, "total_episodes", path),
        total_frames=_count(raw, "total_frames", path),
        total_tasks=_count(raw, "total_tasks", path),
        data_path=template,
        video_path=video_path if isinstance(video_path, str) else None,
        chunks_size=max(1, _count(raw, "chunks_size", path, CHUNKS_SIZE)),
        robot_type=robot_type if isinstance(robot_type, str) else None,
        raw=raw,
    )


def choose_features(info: Info, features: Sequence[str] | None, exclude: Sequence[str] | None) -> Info:
    """Return the description with only the features that are wanted: names or patterns such as `observation.*`."""
    kept = set(info.features) - set(BOOKKEEPING)
    if features is not None:
        kept = _matching(info, features, "features")
    kept -= _matching(info, exclude or (), "exclude")
    if not kept:
        raise DataError(f"{info.root}: features and exclude leave no feature of {_choices(info)}")
    chosen = {name: feature for name, feature in info.features.items() if name in kept or name in BOOKKEEPING}
    return replace(info, features=chosen)


def _matching(info: Info, patterns: Sequence[str], option: str) -> set[str]:
    if isinstance(patterns, str):
        raise DataError(f"{option} must be a list of names or patterns, got the text {patterns!r}")
    found: set[str] = set()
    for pattern in patterns:
        if pattern in BOOKKEEPING and option == "exclude":
            raise DataError(f"{info.root}: exclude names {pattern!r}, which every batch has and cannot do without")
        matched = {name for name in info.features if name == pattern or fnmatchcase(name, pattern)}
        if not matched:
            near = did_you_mean(pattern, info.features)
            raise DataError(f"{info.root}: {option} names {pattern!r}, which matches none of {_choices(info)}{near}")
        found |= matched
    return found - set(BOOKKEEPING)


def _choices(info: Info) -> str:
    return ", ".join(name for name in info.features if name not in BOOKKEEPING)


def _count(raw: Mapping[str, Any], name: str, path: Path, default: int = 0) -> int:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"{path}: {name} must be a whole number, got {value!r}")
    return value


def _features(raw: Any, path: Path) -> dict[str, FeatureInfo]:
    if not isinstance(raw, dict) or not raw:
        raise DataError(f"{path}: 'features' must describe at least one feature")
    features = {name: make_feature(name, value, str(path)) for name, value in raw.items()}
    for name in BOOKKEEPING:
        if name not in features:
            raise DataError(f"{path}: the feature {name!r}, which every LeRobot dataset has, is missing")
        if not features[name].is_numeric or math.prod(features[name].shape) != 1:
            raise DataError(f"{path}: the feature {name!r} must be one number a frame, got {raw[name]}")
    return features


def make_feature(name: str, raw: Any, where: str) -> FeatureInfo:
    """Check the description of one feature."""
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: feature {name!r} must have dtype and shape, got {raw!r}")
    if not name or "/" in name:
        raise DataError(f"{where}: feature name {name!r} must not be empty or contain '/'")
    dtype, shape = raw.get("dtype"), raw.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list | tuple):
        raise DataError(f"{where}: feature {name!r} needs a dtype and a shape, got {dict(raw)}")
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 31 for size in shape):
        raise DataError(f"{where}: the shape of feature {name!r} must be positive whole numbers, got {list(shape)}")
    sizes, names = tuple(shape), raw.get("names")
    if dtype in CAMERA_DTYPES:
        if len(sizes) != 3:
            raise DataError(f"{where}: camera {name!r} must have 3 dimensions, got {list(shape)}")
        sizes = _height_width_channels(sizes, names)
        if sizes[2] not in (1, 3):
            raise DataError(f"{where}: camera {name!r} must have 1 or 3 channels, got shape {list(shape)}")
    feature = FeatureInfo(name, dtype, sizes or (1,), names)
    if not (feature.is_camera or feature.is_numeric or dtype in SKIPPED_DTYPES):
        raise DataError(f"{where}: feature {name!r} has dtype {dtype!r}, which is unknown")
    return feature


def _height_width_channels(shape: tuple[int, ...], names: Any) -> tuple[int, ...]:
    # Both orders are found in the wild; the names decide, and without them the place of a dimension of 1 or 3.
    first = str(names[0]) if isinstance(names, list | tuple) and len(names) == 3 else ""
    channels_first = first.startswith("channel") or (not first and shape[0] in (1, 3) and shape[2] not in (1, 3))
    return (shape[1], shape[2], shape[0]) if channels_first else shape
