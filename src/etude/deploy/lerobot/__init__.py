"""Policies to and from LeRobot 0.4.4: the same weights under its names, its config.json and its processors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.deploy.lerobot.reading import import_lerobot
    from etude.deploy.lerobot.writing import export_lerobot

__all__ = ["export_lerobot", "import_lerobot"]

_HOMES = {"reading": ("import_lerobot",), "writing": ("export_lerobot",)}
__getattr__, __dir__ = lazily(__name__, _HOMES)
