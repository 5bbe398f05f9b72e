"""Policies at work: served to robots over a WebSocket, or exported as one file that needs no training code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.deploy.client import PolicyClient
    from etude.deploy.export import export_policy
    from etude.deploy.exported import ExportedPolicy, load_exported
    from etude.deploy.server import PolicyServer

__all__ = ["ExportedPolicy", "PolicyClient", "PolicyServer", "export_policy", "load_exported"]

# The client runs on robots that have no torch.
_HOMES = {
    "client": ("PolicyClient",),
    "export": ("export_policy",),
    "exported": ("ExportedPolicy", "load_exported"),
    "server": ("PolicyServer",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
