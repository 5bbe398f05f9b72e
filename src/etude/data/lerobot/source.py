"""A dataset on disk as columns: metadata read, parquet files copied once into memory-mapped arrays, cameras decoded."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.data.lerobot.cache import Cache
from etude.data.lerobot.columns import CACHE_FORMAT, columns_key, open_columns
from etude.data.lerobot.crosscheck import check_numbers, check_pictures, check_tasks
from etude.data.lerobot.episodes import Episodes, read_episodes, read_task_texts
from etude.data.lerobot.frames import Frames, ImageSource, Source, VideoSource, copy_pictures, decode_all, find_stamps
from etude.data.lerobot.layout import BOOKKEEPING, FeatureInfo, Info, choose_features, read_info
from etude.data.lerobot.options import ReadKeywords, ReadOptions
from etude.data.lerobot.tables import arrow
from etude.data.lerobot.validate import check_columns, check_manifest, default_tolerance_s
from etude.errors import DataError

log = logging.getLogger("etude.data")
Array = NDArray[Any]


class LeRobotSource:
    """One dataset on disk, checked: every frame of every episode, by feature.

    Args:
        root: Directory that has `meta/info.json`.
        warn: Say when the budget does not hold all frames.
        keywords: Fields of `ReadOptions`.
    """

    def __init__(self, root: str | Path, *, warn: bool = True, **keywords: ReadKeywords) -> None:
        options = ReadOptions(**keywords)
        arrow()
        self.root = Path(root)
        self.info: Info = choose_features(read_info(self.root), options.features, options.exclude)
        self.episodes: Episodes = read_episodes(self.info)
        self.tasks: list[str] = read_task_texts(self.info)
        self._budget_bytes = int(_checked_budget(options.cache_gb) * 1e9)
        self._show_progress, self._warn, self._cross_check = options.show_progress, warn, options.cross_check
        chosen = _chosen(self.info, options.cameras)
        self._cache = Cache(self.root, options.cache_dir)
        self._data_files = sorted(set(self.episodes.data_files))
        videos = [file for name in chosen for file in (self.episodes.clips[name].files if self._is_video(name) else [])]
        self._hashes = self._cache.hash_files([*self.episodes.meta_files, *self._data_files, *videos])
        check_manifest(self.root, self._hashes)
        arrays, self._order = open_columns(self.info, self.episodes, self._cache, self._hashes)
        tolerance = default_tolerance_s(self.info.fps) if options.tolerance_s is None else options.tolerance_s
        check_columns(arrays, self.info, self.episodes, self.tasks, tolerance)
        if options.cross_check:
            self._compare_with_notes(arrays, with_time=options.tolerance_s is None)
        self.columns: dict[str, Any] = {name: _for_training(name, values) for name, values in arrays.items()}
        self._open_cameras(chosen, arrays["timestamp"])

    @property
    def fingerprint(self) -> str:
        """What tells these files from others: their hashes, which are kept while size and time stay."""
        return " ".join(self._hashes.values())

    def _is_video(self, name: str) -> bool:
        return self.info.features[name].dtype == "video"

    # -- numbers ------------------------------------------------------------------------------------------------

    def _compare_with_notes(self, arrays: dict[str, Array], *, with_time: bool) -> None:
        check_tasks(arrays["task_index"], self.tasks, self.info, self.episodes)
        # Order, tasks and, to a tenth of a frame, time are checked without statistics.
        judged = {name: values for name, values in arrays.items() if name not in BOOKKEEPING}
        if with_time:
            judged["timestamp"] = arrays["timestamp"]
        kind, key = columns_key(self.info, self.episodes, self._hashes)
        # An empty entry says that these very files were compared before.
        self._cache.get(
            kind.replace("columns", "compared"), [*key, with_time],
            lambda target: check_numbers(judged, self.info, self.episodes),
        )  # fmt: skip

    # -- cameras ------------------------------------------------------------------------------------------------

    def _open_cameras(self, names: Sequence[str], timestamps: Array) -> None:
        sources = {name: self._source(self.info.features[name], timestamps) for name in names}
        frame_bytes = sum(int(np.prod(source.feature.shape)) for source in sources.values())
        # The same number of episodes of every camera: a sample is fast only if all its pictures are at hand.
        affordable = self._budget_bytes // max(1, frame_bytes)
        count = int(np.searchsorted(self.episodes.ends, affordable, side="right"))
        if sources and count < len(self.episodes) and self._warn:
            log.warning(
                "%s: %.1f GB of decoded frames exceed cache_gb=%g; %d of %d episodes are cached, others decoded on the "
                "fly", self.root, frame_bytes * len(timestamps) / 1e9, self._budget_bytes / 1e9, count,
                len(self.episodes),
            )  # fmt: skip
        for name, source in sources.items():
            cached = self._decoded(source, count) if count else None
            whole = cached is not None and count == len(self.episodes)
            self.columns[name] = torch.from_numpy(cached) if whole else Frames(source, self.episodes, cached)

    def _source(self, feature: FeatureInfo, timestamps: Array) -> Source:
        key = [*self._key(feature), self._file_keys(feature)]
        if feature.dtype == "video":
            key.append([self._hashes[path] for path in self._data_files])  # the timestamps are there

            def find(target: Path) -> None:
                np.save(target / "stamps.npy", find_stamps(self.info, self.episodes, feature, timestamps))

            entry = self._cache.get(f"stamps_{_slug(feature.name)}", key, find)
            stamps = np.load(entry / "stamps.npy", mmap_mode="r")
            return VideoSource(self.info, self.episodes, feature, stamps, strict=self._cross_check)
        blobs = self._cache.get(
            f"pictures_{_slug(feature.name)}", key,
            lambda target: copy_pictures(self._data_files, self._order, feature.name, target),
        )  # fmt: skip
        return ImageSource(self.info, self.episodes, feature, blobs)

    def _key(self, feature: FeatureInfo) -> list[Any]:
        return [CACHE_FORMAT, self._cross_check, feature.name, list(feature.shape), self.info.fps]

    def _file_keys(self, feature: FeatureInfo) -> list[str]:
        files = self.episodes.clips[feature.name].files if feature.dtype == "video" else self._data_files
        meta = [self._hashes[path] for path in self.episodes.meta_files]
        return [*meta, *(self._hashes[path] for path in dict.fromkeys(files))]

    def _decoded(self, source: Source, count: int) -> Array:
        feature = source.feature
        height, width, channels = feature.shape
        rows = int(self.episodes.ends[count - 1])
        key = [*self._key(feature), count, self._file_keys(feature)]

        def build(target: Path) -> None:
            with _progress(f"decoding {feature.name}", rows, self._show_progress) as advance:
                means = decode_all(source, self.episodes, count, target / "frames.u8", advance)
            if self._cross_check:
                check_pictures(feature.name, means, self.info, self.episodes)

        entry = self._cache.get(f"frames_{_slug(feature.name)}", key, build) / "frames.u8"
        # Copy on write: torch wants memory that it may write to, and nothing ever reaches the file.
        return np.memmap(entry, dtype=np.uint8, mode="c", shape=(rows, channels, height, width))


def _checked_budget(cache_gb: float) -> float:
    if not cache_gb >= 0:
        raise DataError(f"cache_gb must not be negative, got {cache_gb}")
    return cache_gb


def _chosen(info: Info, cameras: Sequence[str] | None) -> list[str]:
    known = info.cameras
    if cameras is None:
        return list(known)
    names = [name if name in known else f"observation.images.{name}" for name in cameras]
    if unknown := [name for name, full in zip(cameras, names, strict=True) if full not in known]:
        raise DataError(f"{info.root}: there is no camera {unknown[0]!r}; there are {sorted(known) or 'none'}")
    return list(dict.fromkeys(names))


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in name)


def _for_training(name: str, values: Array) -> Tensor:
    # Policies compute in float32; float64 recordings would make every batch twice as large and then be cast.
    wide = values.dtype in (np.float64, np.float16) and name not in BOOKKEEPING
    return torch.from_numpy(values.astype(np.float32) if wide else values)


@contextmanager
def _progress(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Count frames: as a bar in a terminal, as one line in a log elsewhere."""
    begun = time.perf_counter()
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    seconds = time.perf_counter() - begun
    log.info("%s: %d frames in %.1f s (%.0f a second)", what, total, seconds, total / max(seconds, 1e-9))
