"""Statistics of features: exact, vectorised, over any set of episodes, and weighted over several datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Stats = dict[str, Array]

QUANTILES: Final = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
PICTURES_SAMPLED: Final = 256
"""Frames that the statistics of a camera are taken from; colour means move by less than 0.2 % beyond it."""
_PIXELS_ACROSS: Final = 150
_LEVELS: Final = np.arange(256) / 255.0


def column_stats(parts: Sequence[tuple[Array, float]]) -> Stats:
    """Return mean, std, min, max, quantiles (shape of one row) and count over arrays of rows with a weight each."""
    arrays = [rows.reshape(len(rows), -1).astype(np.float64) for rows, _ in parts]
    shape = parts[0][0].shape[1:]
    values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    total = sum(weight for _, weight in parts)
    weights = np.concatenate([np.full(len(rows), weight / total / len(rows)) for rows, weight in parts])
    mean = weights @ values
    std = np.sqrt(weights @ np.square(values - mean))
    found = {"min": values.min(0), "max": values.max(0), "mean": mean, "std": std}
    found |= _weighted_quantiles(values, weights) if len(arrays) > 1 else _quantiles(values)
    return {**{name: value.reshape(shape) for name, value in found.items()}, "count": np.array([len(values)])}


def _quantiles(values: Array) -> Stats:
    return dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values()), axis=0), strict=True))


def _weighted_quantiles(values: Array, weights: Array) -> Stats:
    found = np.empty((len(QUANTILES), values.shape[1]))
    for column in range(values.shape[1]):
        order = np.argsort(values[:, column], kind="stable")
        # The middle of each row's own weight, stretched so that the ends are the least and the greatest value.
        places = np.cumsum(weights[order]) - weights[order] / 2
        places = (places - places[0]) / max(places[-1] - places[0], 1e-300)
        found[:, column] = np.interp(list(QUANTILES.values()), places, values[order, column])
    return dict(zip(QUANTILES, found, strict=True))


class PictureStats:
    """Statistics of a camera per channel, in 0..1: exact for the pixels seen, since there are only 256 levels."""

    def __init__(self, channels: int) -> None:
        self.histogram = np.zeros((channels, 256), dtype=np.int64)
        self.pictures = 0

    def add(self, picture: Array) -> None:
        """Take in one picture (H, W, C); large ones are thinned out."""
        stride = max(1, min(picture.shape[:2]) // _PIXELS_ACROSS)
        thinned = picture[::stride, ::stride]
        for channel in range(thinned.shape[2]):
            self.histogram[channel] += np.bincount(thinned[..., channel].reshape(-1), minlength=256)
        self.pictures += 1

    def result(self) -> Stats:
        """Return the statistics, each of shape (C, 1, 1)."""
        return picture_stats([(self.histogram, 1.0)], self.pictures)


def picture_stats(parts: Sequence[tuple[Array, float]], pictures: int) -> Stats:
    """Return per-channel statistics of weighted histograms (C, 256), each of shape (C, 1, 1)."""
    shares = sum(weight * histogram / histogram.sum(1, keepdims=True) for histogram, weight in parts)
    shares = np.asarray(shares) / sum(weight for _, weight in parts)
    mean = shares @ _LEVELS
    seen = shares > 0
    found: Stats = {
        "min": _LEVELS[seen.argmax(1)],
        "max": _LEVELS[255 - seen[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(shares @ np.square(_LEVELS) - np.square(mean), 0.0)),
    }
    cumulated = np.cumsum(shares, axis=1)
    for name, share in QUANTILES.items():
        found[name] = _LEVELS[np.minimum((cumulated < share - 1e-12).sum(1), 255)]
    return {**{name: value[:, None, None] for name, value in found.items()}, "count": np.array([pictures])}


def merge_stats(episodes: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Join statistics of episodes into those of a dataset, as stored in `meta/stats.json`; quantiles are averages."""
    return {name: _merge([stats[name] for stats in episodes]) for name in episodes[0]}


def _merge(parts: Sequence[Stats]) -> Stats:
    counts = np.array([part["count"][0] for part in parts], dtype=np.float64)
    shares = counts / counts.sum()
    stacked = {name: np.stack([part[name] for part in parts]) for name in parts[0] if name != "count"}
    mean = np.tensordot(shares, stacked["mean"], 1)
    spread = np.square(stacked["std"]) + np.square(stacked["mean"] - mean)
    merged = {name: np.tensordot(shares, values, 1) for name, values in stacked.items()}
    merged |= {"mean": mean, "std": np.sqrt(np.tensordot(shares, spread, 1))}
    merged |= {"min": stacked["min"].min(0), "max": stacked["max"].max(0), "count": np.array([int(counts.sum())])}
    return merged
