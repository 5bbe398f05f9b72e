"""LeRobot datasets (v3.0 read and write, v2.1 read) without the lerobot package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.data.lerobot.reader import LeRobotDataset
    from etude.data.lerobot.writer import LeRobotWriter

__all__ = ["LeRobotDataset", "LeRobotWriter"]
__getattr__, __dir__ = lazily(__name__, {"reader": ["LeRobotDataset"], "writer": ["LeRobotWriter"]})
