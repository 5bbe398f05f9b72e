"""The engine `remote`: a training service computes and updates; the loop, its data and its checkpoints stay here."""

from __future__ import annotations

from etude.engines.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
