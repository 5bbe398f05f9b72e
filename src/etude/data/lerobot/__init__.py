"""LeRobot datasets (v3.0 read and write, v2.1 read) without the lerobot package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.data.lerobot.reader import LeRobotDataset as LeRobotDataset
    from etude.data.lerobot.writer import LeRobotWriter as LeRobotWriter

_HOMES = {"LeRobotDataset": "reader", "LeRobotWriter": "writer"}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
