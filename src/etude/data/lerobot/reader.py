"""`LeRobotDataset`: episodes of a LeRobot dataset on disk, with windows in time, one gather a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.data.histories import ImageWindow, Window
from etude.data.lerobot.layout import BOOKKEEPING
from etude.data.lerobot.options import ReadKeywords
from etude.data.lerobot.source import LeRobotSource
from etude.data.lerobot.stats import PICTURES_SAMPLED, PictureStats, Stats, column_stats, picture_stats
from etude.data.order import Indices, Keys
from etude.data.symmetry import RandomMirror, RandomTurn
from etude.data.windows import Windows, role_of
from etude.errors import DataError
from etude.types import DataSpec, Feature

Augmentation = Any
"""Called with (images uint8 (B, ..., C, H, W), keys (B,)); returns images of the same shape."""

_DELTA_TOLERANCE_S = 1e-4


class LeRobotDataset:
    """Frames of a LeRobot dataset (v3.0 or v2.1), each with its window in time, read a batch at a time.

    Numbers come as (B, ...), cameras as uint8 (B, C, H, W); features with a window as (B, T, ...) with `<name>_is_pad`.
    Everything is checked when the dataset is opened. Videos and images are decoded once, in parallel, into a cache of
    at most `cache_gb`; episodes above that are decoded on the fly.

    Args:
        root: Directory that has `meta/info.json`.
        episodes: Which episodes to serve; None means all.
        delta_timestamps: Windows in seconds by feature name, multiples of 1 / fps.
        stats_episodes: Episodes that statistics come from; those served if None.
        augment: Changes samples in training; see `etude.data.augment`.
        keywords: Fields of `ReadOptions`: cameras, features, cache_gb and so on; an open source has them already.
    """

    def __init__(
        self,
        root: str | Path | LeRobotSource,
        episodes: Sequence[int] | None = None,
        *,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        stats_episodes: Sequence[int] | None = None,
        augment: Augmentation | None = None,
        **keywords: ReadKeywords,
    ) -> None:
        source = root if isinstance(root, LeRobotSource) else LeRobotSource(root, **keywords)
        self.source = source
        self.root, self.fps, self.tasks = source.root, source.info.fps, source.tasks
        self.augment = augment
        self.episodes = _checked_episodes(source, episodes)
        self._stats_episodes = self.episodes if stats_episodes is None else _checked_episodes(source, stats_episodes)
        # Rows of the episodes served; None if those are all, in order.
        everything = self.episodes == list(range(len(source.episodes)))
        self._rows = None if everything else source.episodes.rows(self.episodes)
        self.cameras = [name for name in source.columns if name in source.info.cameras]
        self._deltas = self._to_frames(delta_timestamps or {})
        self._windows = self._make_windows()
        turned, mirrored = getattr(augment, "turn", None), getattr(augment, "mirror", None)
        self._turn = None if turned is None else RandomTurn(turned, DataSpec(self._plain_features()))
        self._mirror = None if mirrored is None else RandomMirror(**mirrored, spec=DataSpec(self._plain_features()))

    def _plain_features(self) -> dict[str, Feature]:
        """Describe the features without their statistics, which take a pass over the data."""
        described = {name: self.source.info.features[name] for name in self._described()}
        roles = {name: "image" if name in self.cameras else role_of(name) for name in described}
        return {
            name: Feature(tuple(info.shape), role=roles[name], names=info.dimension_names)
            for name, info in described.items()
        }  # fmt: skip

    # -- shape --------------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """What tells this data from other data: the hashes of its files, and which episodes are served."""
        return f"{self.source.fingerprint} {self.episodes}"

    @property
    def num_episodes(self) -> int:
        """How many episodes are served."""
        return len(self.episodes)

    @property
    def features(self) -> dict[str, Any]:
        """The features as `info.json` describes them."""
        return dict(self.source.info.features)

    def __len__(self) -> int:
        return int(self.source.episodes.ends[-1]) if self._rows is None else len(self._rows)

    # -- windows ------------------------------------------------------------------------------------------------

    def use_windows(self, observation: Window = None, action: Window = None, images: ImageWindow = "alike") -> None:
        """Give observations and actions a window, as distances in frames; None gives single frames.

        What a policy asks for (`observation_delta_indices`, `action_delta_indices`) can be passed on as it is. Pictures
        may have a window of their own.
        """
        for name in self.source.columns:
            wanted = observation
            if name in self.cameras and images != "alike":
                wanted = images
            if role_of(name) == "action":
                wanted = action
            elif not name.startswith("observation") and name not in self.cameras:
                continue
            if wanted is None:
                self._deltas.pop(name, None)
            else:
                self._deltas[name] = [int(step) for step in wanted]
        self._windows = self._make_windows()

    def _to_frames(self, delta_timestamps: Mapping[str, Sequence[float]]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, seconds in delta_timestamps.items():
            found[name] = [round(second * self.fps) for second in seconds]
            for second, frames in zip(seconds, found[name], strict=True):
                if abs(second - frames / self.fps) > _DELTA_TOLERANCE_S:
                    raise DataError(
                        f"delta_timestamps of {name!r}: {second} s is not a multiple of 1/{self.fps:g} s; the nearest "
                        f"is {frames / self.fps:g} s"
                    )
        return found

    def _make_windows(self) -> Windows:
        return Windows(self.source.columns, self.source.episodes.ends, self._deltas, fps=self.fps)

    # -- samples ------------------------------------------------------------------------------------------------

    def gather(self, indices: Indices, keys: Keys) -> dict[str, Tensor]:
        """Return the samples at `indices` as one batch; augmentation draws from the keys."""
        rows = np.asarray(indices, dtype=np.int64)
        batch = self._windows.gather(rows if self._rows is None else self._rows[rows], keys)
        if self.augment is not None:
            for number, name in enumerate(self.cameras):
                batch[name] = self.augment(batch[name], keys, number)
        if self._turn is not None:
            self._turn(batch, keys)
        if self._mirror is not None:
            self._mirror(batch, keys)
        return batch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"sample {index} of {length}")
        key = torch.randint(1 << 62, (1,)).numpy().astype(np.uint64) if self.augment is not None else _NO_KEY
        batch = self.gather(np.array([index % length]), key)
        return {name: values[0] for name, values in batch.items()}

    # -- statistics ---------------------------------------------------------------------------------------------

    @cached_property
    def stats(self) -> dict[str, Stats]:
        """Statistics of every feature over the episodes they are to come from, computed from the data itself."""
        return mixed_stats([(self, 1.0)], self._described())

    @cached_property
    def spec(self) -> DataSpec:
        """The features with their statistics; cameras as (C, H, W) with statistics per channel in 0..1."""
        return DataSpec(spec_features(self, self.stats), self.fps)

    def _described(self) -> list[str]:
        return [name for name in self.source.columns if name not in BOOKKEEPING]

    @cached_property
    def stats_rows(self) -> Indices:
        """Rows that statistics come from."""
        return self.source.episodes.rows(self._stats_episodes)

    @cached_property
    def histograms(self) -> dict[str, tuple[Any, int]]:
        """Histograms (C, 256) of a sample of each camera's pictures, and how many pictures they count."""
        rows = self.stats_rows
        sampled = rows[np.unique(np.linspace(0, len(rows) - 1, PICTURES_SAMPLED).astype(np.int64))]
        found = {}
        for name in self.cameras:
            stats = PictureStats(self.source.columns[name].shape[1])
            for part in np.array_split(sampled, -(-len(sampled) // 32)):
                for picture in np.asarray(self.source.columns[name][part]):
                    stats.add(picture.transpose(1, 2, 0))
            found[name] = stats.histogram, stats.pictures
        return found


_NO_KEY: Keys = np.zeros(1, dtype=np.uint64)


def mixed_stats(parts: Sequence[tuple[LeRobotDataset, float]], names: Sequence[str]) -> dict[str, Stats]:
    """Return statistics of features over several datasets, each with a weight."""
    found: dict[str, Stats] = {}
    for name in names:
        if name in parts[0][0].cameras:
            histograms = [(dataset.histograms[name][0], weight) for dataset, weight in parts]
            found[name] = picture_stats(histograms, sum(dataset.histograms[name][1] for dataset, _ in parts))
        else:
            columns = [(dataset.source.columns[name][dataset.stats_rows].numpy(), weight) for dataset, weight in parts]
            found[name] = column_stats(columns)
    return found


def spec_features(dataset: LeRobotDataset, stats: Mapping[str, Stats]) -> dict[str, Feature]:
    """Describe the features that have statistics, and the task."""
    features: dict[str, Feature] = {}
    for name, found in stats.items():
        column = dataset.source.columns[name]
        tensors = {kind: torch.from_numpy(value).float() for kind, value in found.items() if kind != "count"}
        tensors["count"] = torch.from_numpy(found["count"])
        if name in dataset.cameras:
            features[name] = Feature(tuple(column.shape[1:]), "uint8", "image", stats=tensors)
            continue
        info = dataset.source.info.features[name]
        dtype = str(column.dtype).removeprefix("torch.")
        features[name] = Feature(info.shape, dtype, role_of(name), names=info.dimension_names, stats=tensors)
    features["task_index"] = Feature((), "int64", "task", max(1, len(dataset.tasks)), tuple(dataset.tasks) or None)
    return features


def _checked_episodes(source: LeRobotSource, episodes: Sequence[int] | None) -> list[int]:
    total = len(source.episodes)
    if episodes is None:
        return list(range(total))
    chosen = [int(number) for number in episodes]
    if not chosen:
        raise DataError(f"{source.root}: no episodes are chosen")
    if wrong := [number for number in chosen if not 0 <= number < total]:
        raise DataError(f"{source.root}: there is no episode {wrong[0]}; there are 0 to {total - 1}")
    if len(set(chosen)) < len(chosen):
        raise DataError(f"{source.root}: an episode is chosen twice in {chosen}")
    return chosen
