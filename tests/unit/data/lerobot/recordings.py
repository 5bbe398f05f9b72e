"""Small recordings that the tests of LeRobot datasets share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.data.lerobot import LeRobotDataset, LeRobotWriter

FEATURES: dict[str, dict[str, Any]] = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "grip"]},
    "action": {"dtype": "float32", "shape": (2,)},
}
CAMERAS: dict[str, dict[str, Any]] = {
    "observation.images.top": {"dtype": "video", "shape": (32, 48, 3)},
    "observation.images.wrist": {"dtype": "image", "shape": (24, 16, 3)},
}
TASKS = ("push the block", "lift the block")
NO_KEYS = np.zeros(64, dtype=np.uint64)


def picture(episode: int, frame: int, shape: tuple[int, ...]) -> Any:
    """Make a smooth picture that tells episode and frame apart, and survives a lossy codec."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    planes = [x * 2 + 12 * frame, y * 2 + 50 * episode, np.full_like(x, 20 * frame)]
    return np.stack([np.clip(plane, 0, 255) for plane in planes], -1).astype(np.uint8)


def make_frame(episode: int, frame: int, features: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make one frame whose values say where it is."""
    made: dict[str, Any] = {}
    for name, feature in features.items():
        if feature["dtype"] in ("video", "image"):
            made[name] = picture(episode, frame, feature["shape"])
        else:
            count = int(np.prod(feature["shape"]))
            values = 1000 * episode + 10 * frame + np.arange(count)
            made[name] = values.reshape(feature["shape"]).astype(feature["dtype"])
    return made


def add_episode(writer: LeRobotWriter, number: int, length: int, features: dict[str, dict[str, Any]]) -> None:
    """Record one episode."""
    for frame in range(length):
        writer.add_frame(make_frame(number, frame, features))
    writer.save_episode(TASKS[number % 2])


def record(
    root: Path,
    lengths: tuple[int, ...] = (6, 5, 7),
    *,
    cameras: bool = False,
    fps: float = 10,
    features: dict[str, dict[str, Any]] | None = None,
) -> Path:
    """Record a whole dataset."""
    features = features or {**FEATURES, **(CAMERAS if cameras else {})}
    with LeRobotWriter(root, features, fps, "toy") as writer:
        for number, length in enumerate(lengths):
            add_episode(writer, number, length, features)
    return root


def everything(dataset: LeRobotDataset) -> dict[str, torch.Tensor]:
    """Return all samples as one batch."""
    return dataset.gather(np.arange(len(dataset)), np.zeros(len(dataset), dtype=np.uint64))


def same_recording(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two recordings of the same frames hold the same.

    x264 gives other bytes for the same pictures once in a hundred times on a busy machine, with one thread too; they
    are then up to four grey levels apart.
    """
    video = "observation.images.top"
    distance = (one[video].float() - other[video].float()).abs().amax()
    return bool(distance <= 8) and all(torch.equal(one[name], other[name]) for name in other if name != video)
