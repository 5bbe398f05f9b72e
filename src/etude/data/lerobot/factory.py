"""`lerobot_dataset_factory`: a LeRobot dataset with actions ahead and histories behind, and what to normalise it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from etude.data.augment import Augment
from etude.data.histories import Histories, ImageWindow, Scaling, Window, named_statistics
from etude.data.lerobot.reader import LeRobotDataset
from etude.data.module import find_dataset, split_episodes
from etude.errors import DataError
from etude.signatures.nested import ParametersOf

Split = Literal["all", "train", "validation"]


class LeRobotDatasetFactory:
    """Frames of a LeRobot dataset with the actions that follow and the observations that led there, the oldest first.

    Batches hold the dataset's own names: `action` (B, T, ...) with `action_is_pad`, `observation.*` as single frames or
    (B, T, ...), pictures as uint8 (B, [T,] C, H, W). Statistics are those of the training episodes.

    Args:
        root: Directory of the dataset, or of a folder that holds it as `repo_id`.
        repo_id: Name of a dataset that lerobot has downloaded, such as lerobot/pusht.
        local_files_only: Whether only this machine is looked at, which is always so.
        HZ: Frames a second that a window is made of; that of the dataset if None, else the dataset's rate is a
            multiple of it.
        action_horizon: Actions of a sample, the first at its frame.
        obs_proprio_history: Frames of numbers of a sample, the last at its frame.
        obs_images_history: Frames of each camera, the last at its frame.
        task_name: What the task is called; loggers name their project after it.
        cameras: Which cameras to use; None means all.
        episodes: Which episodes to use; None means all.
        augment: Changes samples in training: an `Augment`, or its parameters.
        normalization: Whether numbers are brought to mean 0 and deviation 1 (mean_std), or to -1..1 (min_max).
        split: Serve all episodes, those for training, or those held out.
        val_fraction: Share of episodes held out where `split` is train or validation.
        split_seed: Decides which.
        cache_gb: How many decoded frames to keep on disk, in 1e9 bytes.
    """

    def __init__(
        self,
        root: str | None = None,
        repo_id: str | None = None,
        local_files_only: bool = False,
        HZ: float | None = None,
        action_horizon: int = 1,
        obs_proprio_history: int = 1,
        obs_images_history: int = 1,
        task_name: str | None = None,
        cameras: Sequence[str] | None = None,
        episodes: Sequence[int] | None = None,
        augment: Augment | Annotated[Mapping[str, Any], ParametersOf("etude.data.augment:Augment")] | None = None,
        normalization: Scaling = "mean_std",
        split: Split = "all",
        val_fraction: float = 0.1,
        split_seed: int = 0,
        cache_gb: float = 4.0,
    ) -> None:
        self.options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}

    def build(self, opt_params: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dataset and what its batches are normalised by."""
        options = type(self)(**{**self.options, **params}).options
        dataset = _Dataset.open(**options)
        norm_stats = named_statistics(dataset.stats, options["normalization"], dataset.cameras)
        return {"dataset": dataset, "norm_stats": norm_stats}


class _Dataset(LeRobotDataset):
    """A dataset whose windows are told; a policy may only ask for the same."""

    histories: Histories

    @classmethod
    def open(
        cls, root: str | None, repo_id: str | None, HZ: float | None, split: Split, val_fraction: float,
        split_seed: int, episodes: Sequence[int] | None, augment: Any, action_horizon: int, obs_proprio_history: int,
        obs_images_history: int, cameras: Sequence[str] | None, cache_gb: float, **_: Any,
    ) -> _Dataset:  # fmt: skip
        """Open what the factory was told."""
        opened = LeRobotDataset(_locate(root, repo_id), episodes, cameras=cameras, cache_gb=cache_gb)
        held_out = [] if split == "all" else split_episodes(opened.episodes, val_fraction, split_seed)
        train = [number for number in opened.episodes if number not in set(held_out)]
        chosen = held_out if split == "validation" else train
        if not chosen:
            raise DataError(f"{opened.root}: no episode is held out for validation; raise val_fraction")
        augment = Augment.of(augment) if isinstance(augment, Mapping) else augment
        dataset = cls(opened.source, chosen, stats_episodes=train, augment=None if split == "validation" else augment)
        stride = dataset.fps / (HZ or dataset.fps)
        if abs(stride - round(stride)) > 1e-6 or stride < 1 - 1e-6:
            raise DataError(f"{dataset.root}: HZ {HZ:g} does not divide the dataset's {dataset.fps:g} frames a second")
        dataset.histories = Histories(action_horizon, obs_proprio_history, obs_images_history, round(stride))
        dataset._take(dataset.histories)
        return dataset

    def use_windows(self, observation: Window = None, action: Window = None, images: ImageWindow = "alike") -> None:
        """Take what a policy asks for, where it agrees with what the dataset was told."""
        self._take(self.histories.agreed(observation, action, images, self.cameras))

    def _take(self, histories: Histories) -> None:
        self._deltas = histories.deltas(self.source.columns, self.cameras)
        self._windows = self._make_windows()


def _locate(root: str | None, repo_id: str | None) -> Path:
    if root is None and repo_id is None:
        raise DataError("lerobot_dataset_factory needs a root or a repo_id")
    if root is None:
        return find_dataset(str(repo_id))
    tried = [Path(root).expanduser()] + ([] if repo_id is None else [Path(root).expanduser() / repo_id])
    for path in tried:
        if (path / "meta" / "info.json").is_file():
            return path
    if repo_id is None:
        return tried[0]  # the reader says what it lacks
    raise DataError(f"there is no LeRobot dataset in {' or '.join(map(str, tried))} (no meta/info.json)")
