"""Policies at work: on a robot, served to robots over a WebSocket, or exported as one file without training code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.deploy.client import PolicyClient
    from etude.deploy.control import ControlSettings
    from etude.deploy.export import export_policy
    from etude.deploy.exported import ExportedPolicy, load_exported
    from etude.deploy.lerobot import export_lerobot, import_lerobot
    from etude.deploy.robot import ActionLimits, Robot
    from etude.deploy.server import PolicyServer
    from etude.deploy.session import RobotSession
    from etude.deploy.simulated import SimulatedRobot

__all__ = ["ActionLimits", "ControlSettings", "ExportedPolicy", "PolicyClient", "PolicyServer", "Robot", "RobotSession"]
__all__ += ["SimulatedRobot", "export_lerobot", "export_policy", "import_lerobot", "load_exported"]

# The client runs on robots that have no torch.
_HOMES = {
    "client": ("PolicyClient",),
    "control": ("ControlSettings",),
    "export": ("export_policy",),
    "exported": ("ExportedPolicy", "load_exported"),
    "lerobot": ("export_lerobot", "import_lerobot"),
    "robot": ("ActionLimits", "Robot"),
    "server": ("PolicyServer",),
    "session": ("RobotSession",),
    "simulated": ("SimulatedRobot",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
