"""What happened on a robot as a LeRobot dataset, written beside the control loop; episodes broken off are kept."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from etude.data.lerobot.writer import LeRobotWriter
from etude.deploy.control import ControlStep
from etude.deploy.robot import Array
from etude.errors import DataError, EtudeError, one_line
from etude.types import Feature
from etude.types.names import ACTION

TIME, MISSED, CLAMPED, PLANNED = "control.time_s", "control.missed", "control.clamped", "control.planned"
_MOST_WAITING = 2_000
"""Frames that may wait to be written before recording counts as too slow."""
_CLOSE_S = 600.0


class RobotRecorder:
    """Writes the steps of episodes in a thread of its own.

    Each frame has what was observed, `action` as it was commanded, `control.planned` as the policy wanted it,
    `control.time_s` since the beginning of the episode, and whether it was `control.missed` or `control.clamped`.

    Args:
        root: Directory of the dataset; one with the same features is added to.
        fps: Steps in a second.
        action: The action's feature in the policy's data.
        task: What is done, in words.
        robot_type: What is recorded.
        images: How pictures are stored.
    """

    def __init__(
        self,
        root: Path,
        fps: float,
        action: Feature,
        task: str,
        *,
        robot_type: str | None = None,
        images: Literal["video", "image"] = "video",
    ) -> None:
        self.root, self._fps, self._action = root, fps, action
        self._task, self._robot_type, self._images = task, robot_type, images
        self._writer: LeRobotWriter | None = None
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._error: Exception | None = None
        self._is_told = False
        self.episodes = self.frames = 0

    def begin(self, observation: Mapping[str, Array], known: Mapping[str, Feature]) -> None:
        """Open the dataset for what the first observation has; features that are known lend their names."""
        if self._writer is not None:
            return
        features: dict[str, Any] = {name: _feature(name, value, known.get(name)) for name, value in observation.items()}
        taken = [name for name in features if name == ACTION or name.startswith("control.")]
        if taken:
            raise DataError(f"the robot observes {taken[0]!r}, a name that the recording uses; choose another")
        action = self._action
        features[ACTION] = {"dtype": action.dtype, "shape": action.shape, "names": list(action.names or ()) or None}
        features[PLANNED] = dict(features[ACTION])
        features[TIME] = {"dtype": "float32", "shape": (1,)}
        features[MISSED] = features[CLAMPED] = {"dtype": "bool", "shape": (1,)}
        self._writer = LeRobotWriter(self.root, features, self._fps, self._robot_type, images=self._images)
        self._thread.start()

    def add(self, step: ControlStep) -> None:
        """Take a step; one at which nothing was commanded is no frame."""
        self.check()
        if step.command is None:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            raise DataError(
                f"{self.root}: {_MOST_WAITING} frames wait to be written, recording cannot keep up; record fewer or "
                "smaller cameras"
            )
        kind = np.dtype(self._action.dtype)
        limited = step.limited
        self._waiting.put(
            {
                **step.observation,
                ACTION: np.asarray(step.command, dtype=kind),
                PLANNED: np.asarray(step.command if step.planned is None else step.planned, dtype=kind),
                TIME: np.asarray([step.time_s], dtype=np.float32),
                MISSED: np.asarray([bool(step.missed)]),
                CLAMPED: np.asarray([limited is not None and (limited.by_position or limited.by_speed)]),
            }
        )

    def end_episode(self) -> None:
        """Put the episode on disk, however it ended."""
        if self._writer is not None:
            self._waiting.put({})

    def check(self) -> None:
        """Raise what went wrong with writing, if anything did; once."""
        if self._error is not None and not self._is_told:
            self._is_told = True
            if isinstance(self._error, EtudeError):
                raise self._error
            raise DataError(f"{self.root}: recording failed: {one_line(self._error)}") from self._error

    def close(self) -> None:
        """Write what is left, and finish the dataset."""
        if self._writer is None:
            return
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise DataError(f"{self.root}: the recording was not written within {_CLOSE_S:g} s")
        self.check()

    def _work(self) -> None:
        writer = self._writer
        assert writer is not None
        before = writer.num_episodes, writer.num_frames
        try:
            try:
                while (item := self._waiting.get()) is not None:
                    if item:
                        writer.add_frame(item)
                    elif writer.episode_length:
                        writer.save_episode(self._task)
            finally:  # what came before a fault is kept, too
                if writer.episode_length:
                    writer.save_episode(self._task)
                if writer.num_episodes:
                    self.episodes, self.frames = writer.num_episodes - before[0], writer.num_frames - before[1]
                    writer.finalize()
        except Exception as error:  # noqa: BLE001 - raised again by `check`, in the loop
            self._error = error
        finally:
            writer.close()


def _feature(name: str, value: Array, known: Feature | None) -> dict[str, Any] | Feature:
    if value.ndim == 3 and value.dtype == np.uint8:
        shape = value.shape if value.shape[2] in (1, 3, 4) else (*value.shape[1:], value.shape[0])
        return Feature(tuple(shape), "uint8", "image")
    if value.dtype.kind not in "biuf":
        raise DataError(f"the robot observes {name} as {value.dtype}, which cannot be recorded; give numbers")
    dtype = "float32" if value.dtype.kind == "f" else value.dtype.name
    names = list(known.names) if known is not None and known.names and len(known.names) == value.size else None
    return {"dtype": dtype, "shape": value.shape or (1,), "names": names}
