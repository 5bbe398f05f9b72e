"""Several datasets by weight as one, addressed by (seed, step): nothing to save, exact shares, every epoch complete."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.data.fetch import Fetch, Request
from etude.data.histories import ImageWindow
from etude.data.indexed import IndexedData
from etude.data.lerobot.layout import BOOKKEEPING
from etude.data.lerobot.reader import LeRobotDataset, mixed_stats, spec_features
from etude.data.order import Indices, Keys, Order, micro_starts
from etude.errors import DataError
from etude.rng import STREAM_EVALUATE, STREAM_ORDER, fold, fold_array
from etude.types import DataSpec
from etude.types.protocols import Place

log = logging.getLogger("etude.data")

BLOCK = 1024
"""Samples in which the weights are met exactly, up to one sample."""
_NEVER_DRAWN = "datasets[{}] has so small a weight ({:g}) that none of {} samples would come from it"


class Mixture:
    """Datasets side by side: sample numbers run through the first, then the second, and so on.

    Features that not all of them have are left out; `dataset_index` tells where a sample comes from, and `task_index`
    counts the tasks of all.

    Args:
        datasets: LeRobot datasets with the same shapes.
        weights: Share of samples from each; in proportion to their frames if None.
    """

    def __init__(self, datasets: Sequence[LeRobotDataset], weights: Sequence[float] | None = None) -> None:
        if not datasets:
            raise DataError("a mixture needs at least one dataset")
        self.datasets = list(datasets)
        given = [float(len(dataset)) for dataset in datasets] if weights is None else [float(w) for w in weights]
        if len(given) != len(datasets) or not all(0 < weight < float("inf") for weight in given):
            raise DataError(f"a mixture of {len(datasets)} datasets needs as many positive weights, got {given}")
        self.weights = [weight / sum(given) for weight in given]
        self.ends = np.cumsum([len(dataset) for dataset in datasets])
        self.tasks = list(dict.fromkeys(task for dataset in datasets for task in dataset.tasks))
        places = {task: number for number, task in enumerate(self.tasks)}
        self._tasks = [torch.tensor([places[task] for task in dataset.tasks]) for dataset in datasets]
        self.names = self._common_names()

    @property
    def fingerprint(self) -> str:
        """What tells this mixture from another: its datasets and their weights."""
        return " ".join([*(dataset.fingerprint for dataset in self.datasets), str(self.weights)])

    def _common_names(self) -> list[str]:
        first = self.datasets[0].source.columns
        common = [name for name in first if all(name in dataset.source.columns for dataset in self.datasets)]
        left_out = sorted({name for dataset in self.datasets for name in dataset.source.columns} - set(common))
        if left_out:
            log.warning("not all datasets of the mixture have %s; they are left out", ", ".join(left_out))
        for name in common:
            shapes = {str(dataset.root): tuple(dataset.source.columns[name].shape[1:]) for dataset in self.datasets}
            if len(set(shapes.values())) > 1:
                raise DataError(f"feature {name!r} has different shapes in the datasets of the mixture: {shapes}")
        if rates := {dataset.fps for dataset in self.datasets} - {self.datasets[0].fps}:
            log.warning("datasets of the mixture have %g and %g frames a second", self.datasets[0].fps, rates.pop())
        return common

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.gather(np.array([range(len(self))[index]]), np.zeros(1, dtype=np.uint64))
        return {name: values[0] for name, values in batch.items()}

    def use_windows(
        self,
        observation: Sequence[int] | None = None,
        action: Sequence[int] | None = None,
        images: ImageWindow = "alike",
    ) -> None:
        """Give observations and actions of every dataset a window, as distances in frames."""
        for dataset in self.datasets:
            dataset.use_windows(observation, action, images)

    def gather(self, indices: Indices, keys: Keys) -> dict[str, Tensor]:
        """Return the samples at `indices` as one batch, in their order."""
        rows = np.asarray(indices, dtype=np.int64)
        owner = np.searchsorted(self.ends, rows, side="right")
        parts, places = [], []
        for number in np.unique(owner).tolist():
            mine = np.flatnonzero(owner == number)
            dataset = self.datasets[number]
            batch = dataset.gather(rows[mine] - (self.ends[number] - len(dataset)), keys[mine])
            batch["task_index"] = self._tasks[number][batch["task_index"]]
            batch["dataset_index"] = torch.full((len(mine),), number)
            parts.append(batch)
            places.append(mine)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        kept = [name for name in parts[0] if name.removesuffix("_is_pad") in self.names or name == "dataset_index"]
        return {name: torch.cat([part[name] for part in parts])[order] for name in kept}

    @cached_property
    def spec(self) -> DataSpec:
        """The features that all have, with the statistics of what is drawn: datasets count by their weight."""
        described = [name for name in self.names if name not in BOOKKEEPING]
        stats = mixed_stats(list(zip(self.datasets, self.weights, strict=True)), described)
        features = spec_features(self.datasets[0], stats)
        task = features["task_index"]
        features["task_index"] = type(task)(
            task.shape, task.dtype, task.role, max(1, len(self.tasks)), tuple(self.tasks) or None
        )
        return DataSpec(features, self.datasets[0].fps)


class MixtureData(IndexedData):
    """Serve a mixture: each block of 1024 samples has exactly its share of every dataset, in an order of its own.

    Within a dataset samples come in a shuffled order that takes each once before any comes again.

    Args:
        mixture: The datasets and their weights.
    """

    def __init__(self, mixture: Mixture) -> None:
        super().__init__(Fetch(mixture), mixture)
        self.mixture = mixture
        exact = np.array(mixture.weights) * BLOCK
        quota = np.floor(exact).astype(np.int64)
        # The largest remainders get what rounding left over.
        quota[np.argsort(quota - exact, kind="stable")[: BLOCK - int(quota.sum())]] += 1
        if not quota.all():
            number = int((quota == 0).argmax())
            raise DataError(_NEVER_DRAWN.format(number, mixture.weights[number], BLOCK))
        self._quota: NDArray[np.int64] = quota
        self._orders: list[Order] = []
        self._blocks: dict[int, tuple[Indices, Indices]] = {}

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        super().open(place)
        self._blocks = {}
        self._orders = [
            Order(len(dataset), seed=fold(place.seed, number), shuffle=place.shuffle, version=place.order_version)
            for number, dataset in enumerate(self.mixture.datasets)
        ]

    def requests(self, step: int) -> list[Request]:
        """Return indices and keys of each micro-batch of this rank in one step."""
        size = self.place.batch_size
        return [self._at(start, size) for start in micro_starts(self.place, step)]

    def _at(self, start: int, count: int) -> Request:
        indices, keys = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.uint64)
        owner, turns = self._dealt(np.arange(start, start + count))
        for number in np.unique(owner).tolist():
            mine = np.flatnonzero(owner == number)
            # Positions in a row take samples of a dataset in a row.
            found, keys[mine] = self._orders[number].at(int(turns[mine[0]]), len(mine))
            indices[mine] = found + (self.mixture.ends[number] - self._orders[number].length)
        return indices, keys

    def _dealt(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return for each position which dataset it belongs to, and how many samples that gave before."""
        blocks, offsets = np.divmod(positions, BLOCK)
        owner, turns = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            mine = blocks == block
            dealt, before = self._deal(block)
            owner[mine], turns[mine] = dealt[offsets[mine]], before[offsets[mine]]
        return owner, turns

    def _deal(self, block: int) -> tuple[Indices, Indices]:
        if block not in self._blocks:
            draws = fold_array(fold(self.place.seed, STREAM_ORDER, block), np.arange(BLOCK))
            owner = np.repeat(np.arange(len(self._quota)), self._quota)[np.argsort(draws, kind="stable")]
            turns = np.empty(BLOCK, dtype=np.int64)
            for number, quota in enumerate(self._quota.tolist()):
                turns[owner == number] = np.arange(block * quota, (block + 1) * quota)
            while len(self._blocks) > 1:  # a batch at the edge needs two
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = owner, turns
        return self._blocks[block]

    def evaluation_requests(self, place: Place) -> Iterator[Request]:
        """Return one ordered pass over all samples of all datasets."""
        key = fold(place.seed, STREAM_EVALUATE)
        for start in range(0, len(self.mixture), place.batch_size):
            indices = np.arange(start, min(start + place.batch_size, len(self.mixture)))
            yield indices, fold_array(key, indices)

    def epochs(self, step: int) -> float:
        """Return `step` optimizer steps as a share of all samples."""
        return step * self.place.global_batch / len(self.mixture)
