"""`episodic_dataset_factory`: HDF5 files of one episode each, read where they lie, frame by frame.

Numbers are read when the dataset is opened, for their statistics are wanted anyway; pictures only when a batch shows
them. A file that cannot be read is an error that names it: skipping it would train on other data than was asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from etude.data.columns import Columns
from etude.data.convert.hdf5 import decompressed, hdf5_files, open_checked
from etude.data.convert.recording import Array, faults, is_pictures
from etude.data.histories import Histories, ImageWindow, Scaling, named_statistics
from etude.data.module import split_episodes
from etude.data.order import Indices, Keys
from etude.data.windows import Windows, role_of, statistics
from etude.errors import DataError
from etude.extras import import_extra
from etude.types import DataSpec, Feature

_WHAT = "an HDF5 episode"
_OPEN_FILES = 32
"""Files that a process keeps open: opening one takes about a millisecond, and there may be thousands."""
_SAMPLED = 200
"""Pictures of each camera that statistics come from."""


@dataclass(frozen=True)
class Part:
    """One array of a file, or some of its columns."""

    key: str
    start: int | None = None
    stop: int | None = None


class EpisodicDatasetFactory:
    """Episodes in HDF5 files, one file each, with the actions that follow and the observations that led there.

    A description says which arrays are what: `{"observations": {"observation.state": ["observations/qpos", {"key":
    "observations/qvel", "start": 0, "stop": 3}], "observation.images.head": "observations/images/head"}, "actions":
    "action"}`; several arrays are joined. Without one, files are read as ALOHA's recorders write them. Batches hold
    `action` (B, T, ...) with `action_is_pad`, which is true after the end of an episode, and `observation.*` as single
    frames or (B, T, ...), the oldest first.

    Args:
        dataset_dir_l: Folders of .hdf5 files, or one.
        task_config: The description.
        task_config_path: A JSON file that holds it.
        task_name: What the task is called; loggers name their project after it.
        chunk_size: Actions of a sample, the first at its frame.
        robot_obs_size: Frames of numbers of a sample, the last at its frame.
        img_obs_size: Frames of each camera, the last at its frame.
        skip_mirrored_data: Leave out files with `mirror` in their name.
        normalization: Whether numbers are brought to mean 0 and deviation 1 (mean_std), or to -1..1 (min_max).
        split: Serve all episodes, those for training, or those held out.
        val_fraction: Share of episodes held out where `split` is train or validation.
        split_seed: Decides which.
        fps: Frames per second, if that is known.
    """

    def __init__(
        self,
        dataset_dir_l: Sequence[str] | str = (),
        task_config: Mapping[str, Any] | None = None,
        task_config_path: str | None = None,
        task_name: str | None = None,
        chunk_size: int = 1,
        robot_obs_size: int = 1,
        img_obs_size: int = 1,
        skip_mirrored_data: bool = False,
        normalization: Scaling = "mean_std",
        split: Literal["all", "train", "validation"] = "all",
        val_fraction: float = 0.1,
        split_seed: int = 0,
        fps: float | None = None,
    ) -> None:
        self.options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}

    def build(self, opt_params: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dataset and what its batches are normalised by."""
        import_extra("h5py", "components")
        options = type(self)(**{**self.options, **params}).options
        files = _find_files(options["dataset_dir_l"], options["skip_mirrored_data"])
        description = _read_description(options["task_config"], options["task_config_path"])
        held_out: list[int] = []
        if options["split"] != "all":
            held_out = split_episodes(range(len(files)), options["val_fraction"], options["split_seed"])
        train = [number for number in range(len(files)) if number not in set(held_out)]
        served = held_out if options["split"] == "validation" else train
        histories = Histories(options["chunk_size"], options["robot_obs_size"], options["img_obs_size"])
        of_train = EpisodicDataset([files[number] for number in train], description, histories, options["fps"])
        dataset = of_train
        if served != train:
            dataset = EpisodicDataset([files[number] for number in served], description, histories, options["fps"])
            dataset.stats = of_train.stats
        norm_stats = named_statistics(dataset.stats, options["normalization"], dataset.cameras)
        return {"dataset": dataset, "norm_stats": norm_stats}


class EpisodicDataset:
    """Frames of HDF5 episodes, each with its window in time."""

    def __init__(
        self,
        files: Sequence[Path],
        description: Mapping[str, list[Part]] | None,
        histories: Histories,
        fps: float | None = None,
    ) -> None:
        self.files, self.histories, self.fps = list(files), histories, fps
        read = [_read_episode(path, description) for path in self.files]
        _require_alike(self.files, [found for found, _ in read])
        ends = np.cumsum([length for _, length in read])
        columns: dict[str, Any] = {}
        for name, first in read[0][0].items():
            parts = [found[name] for found, _ in read]
            columns[name] = Pictures(self.files, parts, ends) if isinstance(first, _Camera) else np.concatenate(parts)
        self.cameras = [name for name, column in columns.items() if isinstance(column, Pictures)]
        self.columns = Columns(columns).columns
        self.ends = ends
        self.stats: dict[str, Any] = {name: self._statistics(name) for name in self.columns}
        self._take(histories)

    def _statistics(self, name: str) -> dict[str, Any]:
        column = self.columns[name]
        if not isinstance(column, Pictures):
            return statistics(column)
        rows = np.unique(np.linspace(0, len(column) - 1, _SAMPLED).astype(np.int64))
        sampled = column[rows]
        column.close()  # workers open their own
        values = torch.from_numpy(sampled).double().div_(255.0).transpose(0, 1).flatten(1)
        named = {
            "mean": values.mean(1),
            "std": values.std(1, correction=0),
            "min": values.amin(1),
            "max": values.amax(1),
        }
        return {kind: value.float().view(-1, 1, 1) for kind, value in named.items()}

    def use_windows(
        self,
        observation: Sequence[int] | None = None,
        action: Sequence[int] | None = None,
        images: ImageWindow = "alike",
    ) -> None:
        """Take what a policy asks for, where it agrees with what the dataset was told."""
        self._take(self.histories.agreed(observation, action, images, self.cameras))

    def _take(self, histories: Histories) -> None:
        self._windows = Windows(self.columns, self.ends, histories.deltas(self.columns, self.cameras), fps=self.fps)

    @cached_property
    def fingerprint(self) -> str:
        """What tells this data from other data: its numbers, and the names and sizes of its files."""
        digest = hashlib.sha256(repr([(path.name, path.stat().st_size) for path in self.files]).encode())
        for name, column in self.columns.items():
            digest.update(name.encode())
            if isinstance(column, torch.Tensor):
                digest.update(column.contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: value[0] for name, value in self.gather(np.array([index % len(self)]), _NO_KEYS).items()}

    def gather(self, indices: Indices, keys: Keys) -> dict[str, Any]:
        """Return the samples at `indices` as one batch."""
        return self._windows.gather(np.asarray(indices, dtype=np.int64), keys)

    @property
    def spec(self) -> DataSpec:
        """The features with their statistics."""
        features = {}
        for name, column in self.columns.items():
            dtype = str(column.dtype).removeprefix("torch.")
            role = "image" if name in self.cameras else role_of(name)
            features[name] = Feature(tuple(column.shape[1:]), dtype, role, stats=self.stats[name])
        return DataSpec(features, self.fps)


_NO_KEYS: Keys = np.zeros(1, dtype=np.uint64)


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Camera:
    """Where the pictures of one episode lie."""

    key: str
    shape: tuple[int, ...]
    """Channels, height and width."""
    compressed: bool


class Pictures:
    """A column of pictures in many files, of which only the frames that are asked for are read."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[Path], cameras: Sequence[_Camera], ends: Indices) -> None:
        self._files, self._cameras, self._ends = list(files), list(cameras), ends
        self.shape = (int(ends[-1]), *cameras[0].shape)
        self.ndim = len(self.shape)
        self._open: tuple[int, dict[int, Any]] = (os.getpid(), {})

    def __len__(self) -> int:
        return self.shape[0]

    def close(self) -> None:
        """Close the files; they are opened again when they are asked for."""
        owner, files = self._open
        self._open = (os.getpid(), {})
        for file in files.values() if owner == os.getpid() else ():
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": (0, {})}

    def __getitem__(self, rows: Any) -> Array:
        wanted, flat = np.asarray(rows), np.asarray(rows).reshape(-1)
        out = np.empty((len(flat), *self.shape[1:]), dtype=np.uint8)
        episodes = np.searchsorted(self._ends, flat, side="right")
        for episode in np.unique(episodes):
            places = np.flatnonzero(episodes == episode)
            begin = self._ends[episode - 1] if episode else 0
            frames, back = np.unique(flat[places] - begin, return_inverse=True)
            out[places] = self._read(int(episode), frames)[back]
        return out.reshape(*wanted.shape, *self.shape[1:])

    def _read(self, episode: int, frames: Array) -> Array:
        camera, path = self._cameras[episode], self._files[episode]
        with faults(path, _WHAT):
            stored = self._file(episode)[camera.key]
            found = stored[frames] if len(frames) else stored[:0]
            if camera.compressed:
                found = decompressed(found, f"{path}: {camera.key}")
            return np.ascontiguousarray(np.moveaxis(found, 3, 1))

    def _file(self, episode: int) -> Any:
        owner, files = self._open
        if owner != os.getpid():  # HDF5's handles do not survive a fork
            files = {}
            self._open = (os.getpid(), files)
        if episode not in files:
            if len(files) >= _OPEN_FILES:
                files.pop(next(iter(files))).close()
            files[episode] = open_checked(self._files[episode])
        return files[episode]


def _read_episode(path: Path, description: Mapping[str, list[Part]] | None) -> tuple[dict[str, Any], int]:
    """Return the numbers of an episode, where its pictures lie, and how many frames it has."""
    with faults(path, _WHAT), open_checked(path) as file:
        found: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for name, parts in (description or _aloha(file)).items():
            missing = [part.key for part in parts if part.key not in file or not hasattr(file[part.key], "shape")]
            if missing:
                raise DataError(f"{path}: has no array {missing[0]!r}, which {name} is to be made of")
            lengths[name] = min(len(file[part.key]) for part in parts)
            camera = _camera(file[parts[0].key], parts, name, path)
            found[name] = camera if camera is not None else _numbers(file, parts)
        if len(set(lengths.values())) > 1 or not min(lengths.values()):
            raise DataError(f"{path}: its arrays are not equally long, or empty: {lengths}")
        for name, value in found.items():
            if isinstance(value, np.ndarray) and not np.isfinite(value).all():
                raise DataError(f"{path}: {name} is not finite in frame {int(np.argwhere(~np.isfinite(value))[0, 0])}")
        return found, next(iter(lengths.values()))


def _camera(stored: Any, parts: list[Part], name: str, path: Path) -> _Camera | None:
    if role_of(name) != "image":
        return None
    if len(parts) > 1 or parts[0].start is not None or parts[0].stop is not None:
        raise DataError(f"{path}: {name} is to be made of pictures, which are taken whole, one array for each camera")
    if is_pictures(stored) and stored.dtype == np.uint8:
        height, width, channels = stored.shape[1:]
        return _Camera(parts[0].key, (channels, height, width), False)
    if len(stored.shape) in (1, 2):
        height, width, channels = decompressed(stored[:1], f"{path}: {parts[0].key}").shape[1:]
        return _Camera(parts[0].key, (channels, height, width), True)
    raise DataError(
        f"{path}: {parts[0].key} has shape {tuple(stored.shape)} of {stored.dtype}; pictures are uint8 (frames, "
        "height, width, channels), or compressed one by one"
    )


def _numbers(file: Any, parts: list[Part]) -> Array:
    columns = []
    for part in parts:
        values = np.asarray(file[part.key], dtype=np.float32)
        values = values.reshape(len(values), -1) if values.ndim < 2 or len(parts) > 1 else values
        columns.append(values[:, part.start : part.stop])
    return np.ascontiguousarray(np.concatenate(columns, axis=1) if len(columns) > 1 else columns[0])


def _aloha(file: Any) -> dict[str, list[Part]]:
    cameras = sorted(file["observations"].get("images", {}))
    return {
        "observation.state": [Part("observations/qpos")],
        **{f"observation.images.{name}": [Part(f"observations/images/{name}")] for name in cameras},
        "action": [Part("action")],
    }


def _require_alike(files: Sequence[Path], episodes: Sequence[Mapping[str, Any]]) -> None:
    shapes = [{n: v.shape if isinstance(v, _Camera) else v.shape[1:] for n, v in found.items()} for found in episodes]
    for path, found in zip(files, shapes, strict=True):
        if found != shapes[0]:
            raise DataError(f"{path}: holds {found}, and {files[0]} {shapes[0]}; episodes of a dataset are alike")


def _find_files(folders: Sequence[str] | str, skip_mirrored: bool) -> list[Path]:
    named = [folders] if isinstance(folders, str) else list(folders)
    if not named:
        raise DataError("episodic_dataset_factory needs dataset_dir_l, the folders of its .hdf5 files")
    found = []
    for folder in map(Path, named):
        here = [file for file in hdf5_files(folder.expanduser()) if not (skip_mirrored and "mirror" in file.name)]
        if not here:
            raise DataError(f"{folder}: there are no .hdf5 files")
        found += here
    return found


# -- descriptions ------------------------------------------------------------------------------------------------------


def _read_description(given: Mapping[str, Any] | None, path: str | None) -> dict[str, list[Part]] | None:
    if given is not None and path is not None:
        raise DataError("give task_config or task_config_path, not both")
    if path is None:
        return None if given is None else _parse(given, "task_config")
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"task_config_path {path}: cannot be read as JSON ({error})") from error
    return _parse(content, path)


def _parse(content: Any, where: str) -> dict[str, list[Part]]:
    if not isinstance(content, Mapping) or set(content) != {"observations", "actions"}:
        raise DataError(f'{where}: must be {{"observations": {{name: arrays}}, "actions": arrays}}')
    observations = content["observations"]
    if not isinstance(observations, Mapping) or not observations:
        raise DataError(f"{where}: observations must name arrays, {{name: arrays}}")
    wrong = [name for name in observations if not str(name).startswith("observation.")]
    if wrong:
        raise DataError(f"{where}: {wrong[0]!r} is no observation; call it 'observation.{wrong[0]}'")
    named = {str(name): _parts(value, f"{where}: {name}") for name, value in observations.items()}
    return {**named, "action": _parts(content["actions"], f"{where}: actions")}


def _parts(given: Any, where: str) -> list[Part]:
    found = []
    for one in given if isinstance(given, list) else [given]:
        one = {"key": one} if isinstance(one, str) else one
        whole = isinstance(one, Mapping) and isinstance(one.get("key"), str) and one["key"]
        if not whole or set(one) - {"key", "start", "stop"}:
            raise DataError(f"{where}: an array is its key in the file, or {{key, start, stop}}, got {one!r}")
        limits = [one.get(name) for name in ("start", "stop")]
        if any(limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)) for limit in limits):
            raise DataError(f"{where}: start and stop are whole numbers, got {one!r}")
        found.append(Part(one["key"], *limits))
    if not found:
        raise DataError(f"{where}: no array is named")
    return found
