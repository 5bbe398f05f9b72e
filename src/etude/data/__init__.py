"""Where batches come from: every source is addressed by (seed, step), so a resumed run needs nothing but the step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.data.augment import Augment as Augment
    from etude.data.coerce import as_data as as_data
    from etude.data.columns import Columns as Columns
    from etude.data.device import to_device as to_device
    from etude.data.digits import Digits as Digits
    from etude.data.evaluation import evaluation_batches as evaluation_batches
    from etude.data.lerobot.reader import LeRobotDataset as LeRobotDataset
    from etude.data.lerobot.writer import LeRobotWriter as LeRobotWriter
    from etude.data.loader import LoaderData as LoaderData
    from etude.data.map import MapData as MapData
    from etude.data.mixture import Mixture as Mixture
    from etude.data.mixture import MixtureData as MixtureData
    from etude.data.module import LeRobotDataModule as LeRobotDataModule
    from etude.data.stream import StreamData as StreamData
    from etude.data.windows import Windows as Windows

_HOMES = {
    "Augment": "augment",
    "LeRobotDataModule": "module",
    "LeRobotDataset": "lerobot.reader",
    "LeRobotWriter": "lerobot.writer",
    "Mixture": "mixture",
    "MixtureData": "mixture",
    "Columns": "columns",
    "Digits": "digits",
    "LoaderData": "loader",
    "MapData": "map",
    "StreamData": "stream",
    "Windows": "windows",
    "as_data": "coerce",
    "evaluation_batches": "evaluation",
    "to_device": "device",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
