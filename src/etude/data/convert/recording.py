"""What every layout is read as: features, and episodes of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError

Array = NDArray[Any]


@dataclass(frozen=True)
class Recording:
    """Episodes in some layout, opened one at a time.

    `read(number)` returns the arrays (frames, ...) of one episode by feature name.
    """

    features: dict[str, dict[str, Any]]
    """As `LeRobotWriter` takes them; cameras have dtype "video"."""
    episodes: int
    read: Callable[[int], Mapping[str, Any]]
    fps: float
    """Frames per second that the layout implies."""
    task: str
    """What the episodes are for, as far as the layout tells."""
    close: Callable[[], None] = lambda: None


def describe(arrays: Mapping[str, Any], names: Mapping[str, Sequence[str]] | None = None) -> dict[str, dict[str, Any]]:
    """Describe the features of an episode's arrays."""
    described: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        shape = tuple(int(size) for size in array.shape[1:]) or (1,)
        if is_pictures(array):
            described[name] = {"dtype": "video", "shape": shape}
        else:
            kind = "float32" if np.dtype(array.dtype).kind == "f" else str(array.dtype)
            described[name] = {"dtype": kind, "shape": shape, "names": list((names or {}).get(name, ())) or None}
    return described


def is_pictures(array: Any) -> bool:
    """Tell whether an array holds pictures (frames, H, W, 1 or 3)."""
    return len(array.shape) == 4 and array.shape[3] in (1, 3) and min(array.shape[1:3]) >= 8


def as_pixels(array: Array, where: str) -> Array:
    """Return pictures as uint8; floats must lie in 0..1 or 0..255."""
    if array.dtype == np.uint8:
        return array
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 255):
        raise DataError(f"{where}: pixels lie between {low:g} and {high:g}, neither in 0..1 nor in 0..255")
    scale = 255.0 if array.dtype.kind == "f" and high <= 1 else 1.0
    return np.round(array * scale).astype(np.uint8)


@contextmanager
def faults(path: Path, what: str) -> Iterator[None]:
    """Turn what a library says about a broken file into one sentence."""
    try:
        yield
    except DataError:
        raise
    except (OSError, BadZipFile, KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{path}: cannot be read as {what} ({text[0][:200]})") from error
