"""Where batches come from: every source is addressed by (seed, step), so a resumed run needs nothing but the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.data.augment import Augment
    from etude.data.coerce import as_data
    from etude.data.columns import Columns
    from etude.data.device import to_device
    from etude.data.digits import Digits
    from etude.data.evaluation import evaluation_batches
    from etude.data.lerobot.reader import LeRobotDataset
    from etude.data.lerobot.writer import LeRobotWriter
    from etude.data.loader import LoaderData
    from etude.data.map import MapData
    from etude.data.mixture import Mixture, MixtureData
    from etude.data.module import LeRobotDataModule
    from etude.data.replay import ReplayBuffer
    from etude.data.stream import StreamData
    from etude.data.windows import Windows

__all__ = [
    "Augment",
    "Columns",
    "Digits",
    "LeRobotDataModule",
    "LeRobotDataset",
    "LeRobotWriter",
    "LoaderData",
    "MapData",
    "Mixture",
    "MixtureData",
    "ReplayBuffer",
    "StreamData",
    "Windows",
    "as_data",
    "evaluation_batches",
    "to_device",
]

_HOMES = {
    "augment": ("Augment",),
    "coerce": ("as_data",),
    "columns": ("Columns",),
    "device": ("to_device",),
    "digits": ("Digits",),
    "evaluation": ("evaluation_batches",),
    "lerobot.reader": ("LeRobotDataset",),
    "lerobot.writer": ("LeRobotWriter",),
    "loader": ("LoaderData",),
    "map": ("MapData",),
    "mixture": ("Mixture", "MixtureData"),
    "module": ("LeRobotDataModule",),
    "replay": ("ReplayBuffer",),
    "stream": ("StreamData",),
    "windows": ("Windows",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
