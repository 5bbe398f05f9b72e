"""Zarr as diffusion policy keeps it: all frames in a row under `data/`, where episodes end under `meta/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etude.data.convert.harmless import check_zarr
from etude.data.convert.recording import Array, Recording, as_pixels, describe, faults, is_pictures
from etude.errors import DataError, MissingExtraError

FPS = 10.0
_FEATURES = {"state": "observation.state", "keypoint": "observation.environment_state", "action": "action"}
_IGNORED = ("timestamp",)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise MissingExtraError("Zarr recordings need zarr; run: pip install 'etude[sim]'") from error
    return zarr


def detect(path: Path) -> str | None:
    """Return 'zarr' if the path holds that layout."""
    is_zip = path.is_file() and path.name.endswith((".zarr.zip", ".zip"))
    is_folder = path.is_dir() and any((path / name).exists() for name in (".zgroup", "zarr.json", "data/.zgroup"))
    return "zarr" if is_zip or is_folder else None


def open_zarr(path: Path) -> Recording:
    """Open `data/{state,action,img,keypoint,...}` cut into episodes by `meta/episode_ends`."""
    zarr = _zarr()
    with faults(path, "Zarr"):
        check_zarr(path)
        store: Any = zarr.storage.ZipStore(path, mode="r") if path.is_file() else path
        group = zarr.open_group(store, mode="r")
        ends = np.asarray(group["meta/episode_ends"])
        arrays = {name: array for name, array in sorted(group["data"].arrays()) if name not in _IGNORED}
    lengths = np.diff(ends, prepend=0) if ends.ndim == 1 and ends.dtype.kind in "iu" else np.empty(0)
    if not len(lengths) or (lengths <= 0).any():
        raise DataError(f"{path}: meta/episode_ends must rise from episode to episode, got {ends.tolist()[:8]}")
    if "action" not in arrays:
        raise DataError(f"{path}: data/action is missing; there are {sorted(arrays)}")
    if short := {name: array.shape[0] for name, array in arrays.items() if array.shape[0] != ends[-1]}:
        raise DataError(f"{path}: episodes end at frame {ends[-1]}, but the arrays are of other lengths: {short}")

    def read(number: int) -> Mapping[str, Any]:
        begin, end = int(ends[number] - lengths[number]), int(ends[number])
        with faults(path, f"Zarr, episode {number}"):
            return {
                feature_name(name, array): _values(array, begin, end, f"{path}: data/{name}, episode {number}")
                for name, array in arrays.items()
            }

    task = path.name.split(".")[0].replace("_", " ")
    return Recording(describe(read(0)), len(ends), read, FPS, task, getattr(store, "close", lambda: None))


def feature_name(name: str, array: Any) -> str:
    """Return LeRobot's name for an array."""
    if is_pictures(array):
        camera = "image" if name in ("img", "image") else name.removesuffix("_image")
        return f"observation.images.{camera}"
    return _FEATURES.get(name, f"observation.{name}")


def _values(array: Any, begin: int, end: int, where: str) -> Array:
    values = np.asarray(array[begin:end])
    if is_pictures(array):
        return as_pixels(values, where)
    if values.dtype.kind == "f":
        values = values.astype(np.float32)
    return values.reshape(len(values), -1)
