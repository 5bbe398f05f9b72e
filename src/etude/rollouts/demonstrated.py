"""Demonstrations as episodes of a replay buffer, for algorithms that learn from transitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from etude.data.replay import REWARD, ReplayBuffer
from etude.errors import DataError
from etude.rollouts.playing import RewardOf
from etude.types import DataSpec
from etude.types.protocols import Data

_REWARDS = ("next.reward", REWARD)
"""What datasets call the reward of a frame."""


def demonstrated_episodes(data: Data, spec: DataSpec, reward: RewardOf) -> ReplayBuffer:
    """Return the episodes of a dataset, with what of them the environment shows.

    An episode ends in success, which is why it was recorded: nothing is expected to come after it.

    Args:
        data: Frames with an `episode_index`, such as those of a LeRobot dataset.
        spec: What the environment shows and takes.
        reward: Take the reward that was recorded (env), or 1 for the last frame of each episode (success).
    """
    dataset: Any = getattr(data, "dataset", None)
    if not callable(getattr(dataset, "gather", None)) or not hasattr(dataset, "use_windows"):
        raise DataError("learning from transitions needs demonstrations in episodes, such as data: {type: lerobot}")
    dataset.use_windows(None, None)
    rows = np.arange(len(dataset))
    columns = {name: np.asarray(value) for name, value in dataset.gather(rows, rows.astype(np.uint64)).items()}
    found = next((name for name in _REWARDS if name in columns), None)
    if reward == "env" and found is None:
        raise DataError(
            "the demonstrations have no reward (next.reward), so they cannot be learned from beside that of the "
            "environment; set online.reward: success, which counts the last frame of each as the success it is"
        )
    names = [name for name in spec.features if name in columns]
    changes = [np.diff(columns[name]) != 0 for name in ("episode_index", "dataset_index") if name in columns]
    cuts = np.flatnonzero(np.any(changes, axis=0)) + 1
    buffer = ReplayBuffer(max(1, len(rows)), 2**62)
    for part in np.split(rows, cuts):
        episode = {name: columns[name][part] for name in names}
        earned = np.zeros(len(part), dtype=np.float32)
        if reward == "success":
            earned[-1] = 1.0
        else:
            earned = columns[str(found)][part].reshape(len(part)).astype(np.float32)
        buffer.add({**episode, REWARD: earned, "terminated": True, "success": True})
    return buffer
