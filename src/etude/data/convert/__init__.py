"""Recordings in other layouts, converted to LeRobot v3.0."""

from __future__ import annotations

from etude.data.convert.run import Converted, convert

__all__ = ["Converted", "convert"]
