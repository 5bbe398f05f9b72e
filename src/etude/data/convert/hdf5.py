"""Episodic HDF5: one file an episode (ALOHA), or one file with all demonstrations (robomimic)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etude.data.convert.harmless import check_hdf5
from etude.data.convert.recording import Array, Recording, as_pixels, describe, faults, is_pictures
from etude.errors import DataError, MissingExtraError

ALOHA_FPS = 50.0
ROBOMIMIC_FPS = 20.0


def _h5py() -> Any:
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError("HDF5 recordings need h5py; run: pip install 'etude[sim]'") from error
    return h5py


def open_checked(path: Path) -> Any:
    """Open an HDF5 file that has nothing in it but numbers of its own."""
    file = _h5py().File(path, "r")
    try:
        check_hdf5(file, path)
    except BaseException:
        file.close()
        raise
    return file


def detect(path: Path) -> str | None:
    """Return 'aloha' or 'robomimic' if the path holds that layout."""
    files = hdf5_files(path)
    if not files:
        return None
    with faults(files[0], "HDF5"), open_checked(files[0]) as file:
        if "data" in file and any(name.startswith("demo") for name in file["data"]):
            return "robomimic"
        return "aloha" if "action" in file and "observations" in file else None


def hdf5_files(path: Path) -> list[Path]:
    """Return the HDF5 files at a path, numbered ones in the order of their numbers."""
    if path.is_file():
        return [path] if path.suffix in (".hdf5", ".h5") else []
    found = [file for file in path.iterdir() if file.suffix in (".hdf5", ".h5")] if path.is_dir() else []
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


# -- ALOHA ------------------------------------------------------------------------------------------------------------


def open_aloha(path: Path) -> Recording:
    """Open episodes of `/observations/qpos`, `/observations/images/<camera>` and `/action`, one file each."""
    files = hdf5_files(path)
    if not files:
        raise DataError(f"{path}: there are no .hdf5 files")

    def read(number: int) -> Mapping[str, Any]:
        with faults(files[number], "an ALOHA episode"), open_checked(files[number]) as file:
            return _aloha_arrays(file, str(files[number]))

    return Recording(describe(read(0)), len(files), read, ALOHA_FPS, path.stem.replace("_", " "))


def _aloha_arrays(file: Any, where: str) -> dict[str, Array]:
    observations = file["observations"]
    arrays = {"observation.state": _floats(observations["qpos"]), "action": _floats(file["action"])}
    for name, feature in (("qvel", "observation.velocity"), ("effort", "observation.effort")):
        if name in observations:
            arrays[feature] = _floats(observations[name])
    for camera, pictures in observations.get("images", {}).items():
        pixels = np.asarray(pictures)
        place = f"{where}: camera {camera!r}"
        arrays[f"observation.images.{camera}"] = (
            as_pixels(pixels, place) if pixels.ndim == 4 else decompressed(pixels, place)
        )
    return arrays


def decompressed(rows: Array, where: str) -> Array:
    """Decode pictures stored as JPEG, each a row padded with zeros, or a row of its own length."""
    from PIL import Image

    pictures = []
    for number, row in enumerate(rows):
        try:
            with Image.open(io.BytesIO(np.asarray(row, dtype=np.uint8).tobytes())) as image:
                pictures.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError) as error:
            raise DataError(f"{where}, frame {number}: the picture cannot be decoded ({error})") from error
    # The recorders of ALOHA compress with OpenCV, which takes the channels in the order blue, green, red.
    return np.stack(pictures)[..., ::-1]


# -- robomimic --------------------------------------------------------------------------------------------------------


def open_robomimic(path: Path) -> Recording:
    """Open `data/demo_<i>` with `obs/*` and `actions`: vectors are joined to the state, `object` is the environment."""
    files = hdf5_files(path)
    if len(files) != 1:
        raise DataError(f"{path}: robomimic keeps all demonstrations in one file, found {len(files)}")
    with faults(files[0], "a robomimic dataset"):
        file = open_checked(files[0])
    try:
        with faults(files[0], "a robomimic dataset"):
            names = sorted((name for name in file["data"] if name.startswith("demo")), key=lambda n: _natural(Path(n)))
            fps, task = _robomimic_facts(file["data"])
            vectors = _vector_names(file["data"][names[0]]["obs"])
    except BaseException:
        file.close()
        raise

    def read(number: int) -> Mapping[str, Any]:
        with faults(files[0], f"a robomimic demonstration, {names[number]}"):
            return _robomimic_arrays(file["data"][names[number]], vectors, f"{files[0]}: {names[number]}")

    first = read(0)
    dimensions = {"observation.state": _dimension_names(file["data"][names[0]]["obs"], vectors)}
    return Recording(describe(first, dimensions), len(names), read, fps, task, file.close)


def _robomimic_facts(data: Any) -> tuple[float, str]:
    try:
        described = json.loads(data.attrs["env_args"])
        rate = described.get("env_kwargs", {}).get("control_freq", ROBOMIMIC_FPS)
        return float(rate), str(described.get("env_name", "demonstration"))
    except (KeyError, ValueError, TypeError, AttributeError):
        return ROBOMIMIC_FPS, "demonstration"


def _vector_names(observations: Any) -> list[str]:
    return sorted(name for name in observations if name != "object" and len(observations[name].shape) <= 2)


def _dimension_names(observations: Any, vectors: list[str]) -> list[str]:
    widths = [(name, observations[name].shape[1] if len(observations[name].shape) == 2 else 1) for name in vectors]
    return [f"{name}.{number}" if width > 1 else name for name, width in widths for number in range(width)]


def _robomimic_arrays(demo: Any, vectors: list[str], where: str) -> dict[str, Array]:
    observations = demo["obs"]
    length = len(demo["actions"])
    columns = [_floats(observations[name]).reshape(length, -1) for name in vectors]
    arrays: dict[str, Array] = {"action": _floats(demo["actions"])}
    if columns:
        arrays["observation.state"] = np.concatenate(columns, axis=1)
    if "object" in observations:
        arrays["observation.environment_state"] = _floats(observations["object"])
    for name in sorted(observations):
        if is_pictures(observations[name]):
            camera = name.removesuffix("_image")
            arrays[f"observation.images.{camera}"] = as_pixels(np.asarray(observations[name]), f"{where}: {name}")
    if "rewards" in demo:
        arrays["next.reward"] = _floats(demo["rewards"]).reshape(length, 1)
    return arrays


def _floats(array: Any) -> Array:
    return np.asarray(array).astype(np.float32)
