"""Policies at work: served to robots over a WebSocket, or exported as one file that needs no training code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.deploy.client import PolicyClient
    from etude.deploy.export import export_policy
    from etude.deploy.exported import ExportedPolicy, load_exported
    from etude.deploy.server import PolicyServer

__all__ = ["ExportedPolicy", "PolicyClient", "PolicyServer", "export_policy", "load_exported"]

# Lazily: the client runs on robots that have no torch.
_HOMES = {
    "ExportedPolicy": "exported",
    "PolicyClient": "client",
    "PolicyServer": "server",
    "export_policy": "export",
    "load_exported": "exported",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.deploy' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"etude.deploy.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
