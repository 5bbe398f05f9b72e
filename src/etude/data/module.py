"""`LeRobotDataModule`: a LeRobot dataset (or several, by weight) split into training and validation episodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from etude.data.augment import Augment
from etude.data.histories import ImageWindow, Window
from etude.data.lerobot.options import ReadKeywords, ReadOptions
from etude.data.lerobot.reader import LeRobotDataset
from etude.data.map import MapData
from etude.data.mixture import Mixture, MixtureData
from etude.errors import DataError
from etude.rng import fold, fold_array
from etude.signatures.nested import ParametersOf
from etude.types import DataSpec

if TYPE_CHECKING:
    from etude.data.indexed import IndexedData

_SPLIT_KEY = fold(0x1E0B)


class LeRobotDataModule:
    """Training and validation data of LeRobot datasets, for `etude.Trainer` and for Lightning.

    Whole episodes are held out. Statistics come from training episodes only, and describe validation data too. Windows
    are taken from the policy by the Trainer; elsewhere call `use_windows`.

    Args:
        repo_id: Name of a dataset that lerobot has downloaded, such as lerobot/pusht.
        root: Directory of a dataset.
        batch_size: Samples in a batch of the torch loaders; the Trainer takes its own from its configuration.
        val_fraction: Share of episodes held out, chosen by `seed`; None is none, or a tenth where `split` is train or
            validation.
        val_episodes: Episodes held out, instead of a share.
        episodes: Episodes to use at all; None means all.
        val_env: Environment that validation runs in, such as metaworld/pick-place.
        test_env: Environment for the final test.
        augment: Changes samples in training: an `Augment`, or its parameters.
        mix: More datasets by directory or repo_id, with their weights: `{"runs/a": 1.0, "runs/b": 3.0}`.
        delta_timestamps: Windows in seconds by feature name.
        seed: Decides which episodes are held out.
        num_workers: Processes of the torch loaders; a warm cache needs none.
        split: Serve one part alone, whatever it is asked for: all, train or validation. None trains on the training
            episodes and evaluates on those held out.
        split_seed: Another name of `seed`.
        keywords: Fields of `ReadOptions`.
    """

    def __init__(
        self,
        repo_id: str | None = None,
        root: str | Path | None = None,
        *,
        batch_size: int = 32,
        val_fraction: float | None = None,
        val_episodes: Sequence[int] | None = None,
        episodes: Sequence[int] | None = None,
        val_env: str | None = None,
        test_env: str | None = None,
        augment: Augment | Annotated[Mapping[str, Any], ParametersOf("etude.data.augment:Augment")] | None = None,
        mix: Mapping[str, float] | None = None,
        delta_timestamps: Mapping[str, Sequence[float]] | None = None,
        seed: int = 0,
        num_workers: int = 0,
        split: Literal["all", "train", "validation"] | None = None,
        split_seed: int | None = None,
        **keywords: ReadKeywords,
    ) -> None:
        if split not in (None, "all", "train", "validation"):
            raise DataError(f"split must be all, train or validation, got {split!r}")
        if split == "all":
            val_fraction, val_episodes = 0.0, None
        elif val_fraction is None:
            val_fraction = 0.1 if split else 0.0
        if not 0 <= val_fraction < 1:
            raise DataError(f"val_fraction must lie between 0 and 1, got {val_fraction}")
        self.roots, self.weights = _sources(repo_id, root, mix)
        if len(self.roots) > 1 and (episodes is not None or val_episodes is not None):
            raise DataError("episodes and val_episodes name episodes of one dataset; with mix use val_fraction")
        self.batch_size, self.num_workers = batch_size, num_workers
        self.seed = seed if split_seed is None else split_seed
        self.val_env, self.test_env = val_env, test_env
        self._val = (val_fraction, val_episodes)
        self._episodes = episodes
        self._augment = Augment.of(augment) if isinstance(augment, Mapping) else augment
        self._windows, self._split = delta_timestamps, split
        self._keywords = asdict(ReadOptions(**keywords))

    # -- datasets -----------------------------------------------------------------------------------------------

    @cached_property
    def _splits(self) -> tuple[list[LeRobotDataset], list[LeRobotDataset]]:
        train, validation = [], []
        for root in self.roots:
            opened = LeRobotDataset(root, self._episodes, **self._keywords)
            held_out = self._held_out(opened)
            kept = [number for number in opened.episodes if number not in set(held_out)]
            if not kept:
                raise DataError(f"{root}: all {opened.num_episodes} episodes are held out; nothing is left to train on")
            train.append(LeRobotDataset(opened.source, kept, augment=self._augment, delta_timestamps=self._windows))
            if held_out:
                part = LeRobotDataset(opened.source, held_out, stats_episodes=kept, delta_timestamps=self._windows)
                validation.append(part)
        return train, validation

    def _held_out(self, dataset: LeRobotDataset) -> list[int]:
        fraction, chosen = self._val
        if chosen is None:
            return split_episodes(dataset.episodes, fraction, self.seed)
        if unknown := sorted(set(chosen) - set(dataset.episodes)):
            raise DataError(f"{dataset.root}: val_episodes names episode {unknown[0]}, which is not among those used")
        return sorted(chosen)

    @property
    def has_validation(self) -> bool:
        """Whether episodes are held out; the Trainer then evaluates on them by itself."""
        fraction, chosen = self._val
        if self._split is not None:
            return False
        return bool(chosen) if chosen is not None else fraction > 0

    @cached_property
    def train_dataset(self) -> LeRobotDataset | Mixture:
        """What is trained on."""
        train, _ = self._splits
        return train[0] if len(self.roots) == 1 else Mixture(train, self.weights)

    @cached_property
    def val_dataset(self) -> LeRobotDataset | Mixture | None:
        """What is held out; None if nothing is."""
        train, validation = self._splits
        if not validation:
            return None
        if len(self.roots) == 1:
            return validation[0]
        if len(validation) < len(train):
            raise DataError("val_fraction holds out no episode of the smallest dataset of the mix; raise it")
        return Mixture(validation, self.weights)

    @property
    def spec(self) -> DataSpec:
        """The features, with statistics of the training episodes."""
        return self.train_dataset.spec

    @property
    def tasks(self) -> list[str]:
        """The tasks by index."""
        return self.train_dataset.tasks

    def use_windows(self, observation: Window = None, action: Window = None, images: ImageWindow = "alike") -> None:
        """Give observations and actions a window, as distances in frames, in training and validation."""
        for dataset in (self.train_dataset, self.val_dataset):
            if dataset is not None:
                dataset.use_windows(observation, action, images)

    # -- etude --------------------------------------------------------------------------------------------------

    def train_data(self) -> IndexedData:
        """Return the training data, for the Trainer."""
        return self._part(self._split or "train")

    def eval_data(self) -> IndexedData:
        """Return the validation data, for the Trainer's `eval_data`."""
        return self._part(self._split or "validation")

    def _part(self, name: str) -> IndexedData:
        dataset = self.val_dataset if name == "validation" else self.train_dataset
        if dataset is None:
            raise DataError("no episodes are held out for validation; set val_fraction or val_episodes")
        return MixtureData(dataset) if isinstance(dataset, Mixture) else MapData(dataset)

    # -- torch and Lightning ------------------------------------------------------------------------------------

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a torch loader of shuffled training batches."""
        return self._loader(self.train_dataset, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Return a torch loader of validation batches, or an empty list if nothing is held out."""
        return [] if self.val_dataset is None else self._loader(self.val_dataset, shuffle=False)

    def _loader(self, dataset: LeRobotDataset | Mixture, *, shuffle: bool) -> DataLoader[Any]:
        served = _Batches(dataset, shuffle and self._augment is not None)
        sampler = RandomSampler(served) if shuffle else SequentialSampler(served)
        batches = BatchSampler(sampler, self.batch_size, drop_last=False)
        return DataLoader(
            served, batch_sampler=batches, collate_fn=_as_is, num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )  # fmt: skip

    def as_lightning(self) -> Any:
        """Return this module as a `LightningDataModule`, for `lightning.Trainer.fit(model, datamodule=...)`."""
        from lightning import LightningDataModule

        module = self

        class Wrapped(LightningDataModule):
            def train_dataloader(self) -> Any:
                return module.train_dataloader()

            def val_dataloader(self) -> Any:
                return module.val_dataloader()

        return Wrapped()


class _Batches(Dataset[Any]):
    """A dataset whose samples are fetched a batch at a time."""

    def __init__(self, dataset: LeRobotDataset | Mixture, augmented: bool) -> None:
        self._dataset = dataset
        self._augmented = augmented

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        rows = np.asarray(indices, dtype=np.int64)
        # torch seeds its workers and Lightning seeds torch: the global generator is what both control.
        key = int(torch.randint(1 << 62, ())) if self._augmented else 0
        return self._dataset.gather(rows, fold_array(fold(key), rows))


def _as_is(batch: Any) -> Any:
    return batch


def split_episodes(episodes: Sequence[int], fraction: float, seed: int = 0) -> list[int]:
    """Choose the episodes to hold out: at least one if the fraction is not 0, at most all but one."""
    if not fraction:
        return []
    if not 0 < fraction < 1:
        raise DataError(f"the share of episodes held out must lie between 0 and 1, got {fraction}")
    if len(episodes) < 2:
        raise DataError("a dataset of one episode cannot be split by episode; record more, or hold nothing out")
    count = min(max(1, round(fraction * len(episodes))), len(episodes) - 1)
    order = np.argsort(fold_array(fold(_SPLIT_KEY, seed), np.asarray(episodes)), kind="stable")
    return sorted(int(episodes[number]) for number in order[:count])


def find_dataset(repo_id: str) -> Path:
    """Return the directory of a dataset that lerobot has downloaded; this looks on this machine only."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    base = Path(os.environ.get("HF_LEROBOT_HOME") or home / "lerobot")
    path = base / repo_id
    if ".." in Path(repo_id).parts or Path(repo_id).is_absolute():
        raise DataError(f"repo_id must look like owner/name, got {repo_id!r}; for a directory use root")
    if not (path / "meta" / "info.json").exists():
        raise DataError(
            f"the dataset {repo_id!r} is not on this machine (looked in {path}); fetch it with: hf download {repo_id} "
            f"--repo-type dataset --local-dir {path}"
        )
    return path


def _sources(
    repo_id: str | None, root: str | Path | None, mix: Mapping[str, float] | None
) -> tuple[list[Path], list[float] | None]:
    given = sum(value is not None for value in (repo_id, root, mix))
    if given != 1:
        raise DataError("give exactly one of repo_id, root and mix")
    if mix is None:
        return [Path(root) if root is not None else find_dataset(str(repo_id))], None
    if not mix:
        raise DataError("mix names no dataset")
    roots = [Path(name) if Path(name).is_dir() else find_dataset(name) for name in mix]
    return roots, list(mix.values())
