"""A dataset as it is, to be looked at: faults that training would refuse are shown instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.data.lerobot.cache import Cache
from etude.data.lerobot.columns import columns_key, open_columns
from etude.data.lerobot.episodes import read_episodes, read_task_texts
from etude.data.lerobot.layout import BOOKKEEPING, read_info
from etude.data.lerobot.oddities import LARGEST, Mark
from etude.data.lerobot.survey import SURVEY_FORMAT, Survey, Table, survey
from etude.data.lerobot.tables import arrow, pictures, read_episode_table
from etude.errors import DataError

Array = NDArray[Any]

SUCCESS = ("next.success", "success", "is_success")
REWARD = ("next.reward", "reward")


class ViewedDataset:
    """Episodes of a dataset with their numbers and where their pictures are; nothing in them is judged.

    Args:
        root: Directory that has `meta/info.json`.
    """

    def __init__(self, root: str | Path) -> None:
        arrow()
        self.root = Path(root)
        self.info = read_info(self.root)
        self.episodes = read_episodes(self.info)
        self.task_texts = read_task_texts(self.info)
        self._cache = Cache(self.root)
        hashes = self._cache.hash_files([*self.episodes.meta_files, *sorted(set(self.episodes.data_files))])
        self._key = columns_key(self.info, self.episodes, hashes)[1]
        found, _ = open_columns(self.info, self.episodes, self._cache, hashes)
        self._bookkeeping = {name: found[name] for name in BOOKKEEPING}
        self.columns: dict[str, Array] = {
            name: values.reshape(len(values), -1) for name, values in found.items() if name not in BOOKKEEPING
        }
        self.labels = {name: self._labels(name) for name in self.columns}
        self.pictures = lru_cache(maxsize=4)(self._pictures)

    @property
    def name(self) -> str:
        """What the dataset is called."""
        return self.root.resolve().name

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.info.fps

    def __len__(self) -> int:
        return len(self.episodes)

    def _labels(self, name: str) -> tuple[str, ...]:
        feature = self.info.features[name]
        count = self.columns[name].shape[1]
        return feature.dimension_names or (("",) if count == 1 else tuple(map(str, range(count))))

    @property
    def tasks(self) -> list[int]:
        """Task of each episode, by index."""
        return [int(task) for task in self._bookkeeping["task_index"][self.episodes.starts]]

    def task_text(self, index: int) -> str:
        """Return the text of a task, or its number where there is none."""
        known = 0 <= index < len(self.task_texts) and self.task_texts[index]
        return known or f"task {index} (without text)"

    def successes(self) -> list[bool] | None:
        """Return whether each episode reached its goal, where a column says so."""
        name = next((name for name in SUCCESS if name in self.columns), None)
        if name is None:
            return None
        reached = np.nan_to_num(np.asarray(self.columns[name][:, 0], dtype=np.float64)) > 0
        return [bool(one) for one in np.logical_or.reduceat(reached, self.episodes.starts)]

    def returns(self) -> list[float] | None:
        """Return the summed reward of each episode, where there is one."""
        name = next((name for name in REWARD if name in self.columns), None)
        if name is None:
            return None
        rewards = np.nan_to_num(np.asarray(self.columns[name][:, 0], dtype=np.float64), posinf=0.0, neginf=0.0)
        rewards = np.clip(rewards, -LARGEST, LARGEST)  # a sum that overflows is no JSON
        return [float(f"{one:.5g}") for one in np.add.reduceat(rewards, self.episodes.starts)]

    def values(self, name: str, episode: int) -> Array:
        """Return one feature of one episode, as (frames, dimensions)."""
        return self.columns[name][self.episodes.starts[episode] : self.episodes.ends[episode]]

    def video_of(self, camera: str, episode: int) -> tuple[Path, float]:
        """Return the file that holds an episode's video, and when the episode begins in it."""
        clips = self.episodes.clips[camera]
        return clips.files[episode], float(clips.from_s[episode])

    def _pictures(self, camera: str, episode: int) -> list[bytes]:
        """Return the encoded pictures of a camera that is stored as images."""
        path = self.episodes.data_files[episode]
        return pictures(read_episode_table(path, episode, [camera]), camera, path)

    # -- survey -------------------------------------------------------------------------------------------------

    def survey(self, advance: Callable[[int, int], None] = lambda done, total: None) -> Survey:
        """Return what a look over all frames finds; it is kept until a file changes."""
        file = "survey.json"

        def build(target: Path) -> None:
            (target / file).write_text(json.dumps(survey(self._table(), advance).to_values()))

        for attempt in (1, 2):
            entry = self._cache.get("survey", [SURVEY_FORMAT, self._key], build)
            try:
                kept = Survey.from_values(json.loads((entry / file).read_text()))
                return kept.with_marks(self._missing_videos())
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._cache.drop(entry)
                if attempt == 2:
                    raise DataError(f"{entry}: the cache cannot be read back ({error})") from error
        raise AssertionError

    def _table(self) -> Table:
        return Table(
            lengths=self.episodes.lengths, fps=self.fps, timestamps=self._bookkeeping["timestamp"],
            frame_index=self._bookkeeping["frame_index"], tasks=np.asarray(self.tasks), columns=self.columns,
            labels=self.labels,
        )  # fmt: skip

    def _missing_videos(self) -> list[Mark]:
        marks = []
        for camera, clips in self.episodes.clips.items():
            absent = {file for file in dict.fromkeys(clips.files) if not file.is_file()}
            marks += [
                Mark(
                    "video",
                    episode,
                    f"the video of {camera} is missing: {file.relative_to(self.root)}",
                    1e5,
                    None,
                    camera,
                )
                for episode, file in enumerate(clips.files)
                if file in absent
            ]
        return marks
