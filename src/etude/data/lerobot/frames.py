"""Pictures of one camera as rows (C, H, W): from a decoded cache, and on the fly for what the budget leaves out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.episodes import Episodes
from etude.data.lerobot.layout import FeatureInfo, Info
from etude.data.lerobot.tables import decode_picture, pictures, read_table
from etude.data.lerobot.video import DecoderPool, VideoIndex
from etude.errors import DataError

Array = NDArray[Any]
Receive = Callable[[int, Array], None]


def decoding_threads() -> int:
    """Return how many threads decode side by side."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def find_stamps(info: Info, episodes: Episodes, feature: FeatureInfo, timestamps: Array) -> Array:
    """Return the presentation stamp of every frame in its video; refuse a frame that has no picture of its own."""
    clips = episodes.clips[feature.name]
    with ThreadPoolExecutor(decoding_threads()) as threads:
        unique = list(dict.fromkeys(clips.files))
        indices = dict(zip(unique, threads.map(lambda path: VideoIndex(path, feature.shape), unique), strict=True))
    stamps = np.empty(len(timestamps), dtype=np.int64)
    taken = dict.fromkeys(unique, -1)
    for number, file in enumerate(clips.files):
        begin, end = int(episodes.starts[number]), int(episodes.ends[number])
        index = indices[file]
        # Nearest, and nearer than half a frame, is never ambiguous; files joined by others drift by less.
        found = index.find(clips.from_s[number] + timestamps[begin:end].astype(np.float64), 0.45 / info.fps)
        missing = found < 0
        missing[1:] |= found[1:] <= found[:-1]
        missing[0] |= found[0] <= taken[file]  # a picture of the episode before
        taken[file] = int(found[-1])
        if missing.any():
            place = f"{info.root}: episode {number}, frame {missing.argmax()}"
            raise DataError(
                f"{place}: {feature.name!r} has no picture of its own in {file}; the video is too short or its rate "
                "is not that of info.json"
            )
        stamps[begin:end] = index.stamps[found]
    return stamps


class VideoSource:
    """Pictures of a camera stored as video; `stamps` are what `find_stamps` found."""

    def __init__(
        self, info: Info, episodes: Episodes, feature: FeatureInfo, stamps: Array, *, strict: bool = True
    ) -> None:
        self.feature = feature
        self._episodes = episodes
        self._root = info.root
        self._files = episodes.clips[feature.name].files
        self._stamps = stamps
        self._pool = DecoderPool(strict)

    def read(self, rows: Array, receive: Receive) -> None:
        """Decode the pictures of rows of one episode (rising), calling `receive(number, picture)` with (H, W, C)."""
        number = self._episodes.locate(int(rows[0]))[0]
        try:
            self._pool.get(self._files[number]).read(self._stamps[rows], self.feature.shape[2], receive)
        except DataError as error:
            raise DataError(f"{self._root}: episode {number}: camera {self.feature.name!r}: {error}") from error


class ImageSource:
    """Pictures of a camera embedded in the parquet files, copied as they are into one file with random access."""

    def __init__(self, info: Info, episodes: Episodes, feature: FeatureInfo, blobs: Path) -> None:
        self.feature = feature
        self._episodes = episodes
        self._root = info.root
        self._ends = np.load(blobs / "ends.npy")
        self._data = np.memmap(blobs / "pictures.bin", dtype=np.uint8, mode="r")

    def read(self, rows: Array, receive: Receive) -> None:
        """Decode the pictures of rows, calling `receive(number, picture)` with (H, W, C)."""
        for number, row in enumerate(rows.tolist()):
            begin = int(self._ends[row - 1]) if row else 0
            data = self._data[begin : int(self._ends[row])].tobytes()
            episode, frame = self._episodes.locate(row)
            where = f"{self._root}: episode {episode}, frame {frame}: camera {self.feature.name!r}"
            receive(number, decode_picture(data, self.feature.shape, where))


def copy_pictures(files: Sequence[Path], order: Array, name: str, target: Path) -> None:
    """Copy the encoded pictures of a camera out of the parquet files, in the order of the rows."""
    parts: Iterator[list[bytes]] = (pictures(read_table(path, [name]), name, path) for path in files)
    if not np.array_equal(order, np.arange(len(order))):
        listed = [data for part in parts for data in part]
        parts = iter([[listed[row] for row in order.tolist()]])
    sizes: list[int] = []
    with (target / "pictures.bin").open("wb") as file:
        for part in parts:  # one file at a time: together they may not fit in memory
            file.writelines(part)
            sizes += map(len, part)
    np.save(target / "ends.npy", np.cumsum(sizes, dtype=np.int64))


Source = VideoSource | ImageSource


def decode_all(source: Source, episodes: Episodes, count: int, target: Path, progress: Callable[[int], None]) -> Array:
    """Decode the first `count` episodes into a file of (frames, C, H, W), episodes side by side.

    Return the mean colour of each episode, in 0..1.
    """
    height, width, channels = source.feature.shape
    rows = int(episodes.ends[count - 1])
    size = rows * height * width * channels
    with target.open("wb") as file:
        try:
            # Reserved first: a full disk would otherwise end the process in the middle of a write to mapped memory.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise DataError(
                f"{target}: cannot reserve {size / 1e9:.2f} GB for decoded frames ({error.strerror}); lower cache_gb "
                "or set cache_dir"
            ) from error
    out = np.memmap(target, dtype=np.uint8, mode="r+", shape=(rows, channels, height, width))
    means = np.zeros((count, channels))
    stride = max(1, min(height, width) // _PIXELS_ACROSS)

    def decode(number: int) -> None:
        begin, end = int(episodes.starts[number]), int(episodes.ends[number])

        def receive(frame: int, picture: Array) -> None:
            out[begin + frame] = picture.transpose(2, 0, 1)
            means[number] += picture[::stride, ::stride].mean((0, 1)) / (255 * (end - begin))

        source.read(np.arange(begin, end), receive)
        progress(end - begin)

    with ThreadPoolExecutor(decoding_threads()) as threads:
        for _ in threads.map(decode, range(count)):
            pass
    out.flush()
    return means


class Frames:
    """All pictures of a camera, indexed like an array of shape (frames, C, H, W).

    Args:
        source: Decodes what is not at hand.
        episodes: Which rows belong together.
        cached: The decoded pictures of the first rows.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, source: Source, episodes: Episodes, cached: Array | None) -> None:
        self._source = source
        self._episodes = episodes
        self._cached = cached
        self._ready = 0 if cached is None else len(cached)
        height, width, channels = source.feature.shape
        self.shape = (int(episodes.ends[-1]), channels, height, width)
        self._threads: tuple[int, ThreadPoolExecutor] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        """Return pictures for rows of any shape; rows asked for twice are decoded once."""
        wanted = np.asarray(rows)
        unique, inverse = np.unique(wanted.reshape(-1), return_inverse=True)
        out = np.empty((len(unique), *self.shape[1:]), dtype=np.uint8)
        ready = unique < self._ready
        if self._cached is not None and ready.any():
            out[ready] = self._cached[unique[ready]]
        self._decode(unique, np.flatnonzero(~ready), out)
        return out[inverse].reshape(*wanted.shape, *self.shape[1:])

    def _decode(self, rows: Array, places: Array, out: Array) -> None:
        if not len(places):
            return
        episode = np.searchsorted(self._episodes.ends, rows[places], side="right")
        groups = np.split(places, np.flatnonzero(np.diff(episode)) + 1)

        def decode(group: Array) -> None:
            def receive(number: int, picture: Array) -> None:
                out[group[number]] = picture.transpose(2, 0, 1)

            def shifted(offset: int, number: int, picture: Array) -> None:
                receive(offset + number, picture)

            # Frames far apart in an episode are sought one by one: decoding all between them would cost more.
            for run in np.split(group, np.flatnonzero(np.diff(rows[group]) > _FAR_APART) + 1):
                offset = int(np.searchsorted(group, run[0]))
                self._source.read(rows[run], partial(shifted, offset))

        for _ in self._pool().map(decode, groups):
            pass

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None or self._threads[0] != os.getpid():  # threads do not survive a fork
            self._threads = os.getpid(), ThreadPoolExecutor(decoding_threads())
        return self._threads[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": None}


_FAR_APART = 8
_PIXELS_ACROSS = 150
