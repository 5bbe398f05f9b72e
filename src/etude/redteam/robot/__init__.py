"""Adaptive stress testing of robot policies: where they begin and what disturbs them, searched for likely failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.redteam.robot.demonstrations import record_failures
    from etude.redteam.robot.disturbances import DisturbanceSpace, make_space
    from etude.redteam.robot.environment import DisturbedEnvironment
    from etude.redteam.robot.stress import StressResult, read_stress, stress_policy

_HOMES = {
    "demonstrations": ("record_failures",),
    "disturbances": ("DisturbanceSpace", "make_space"),
    "environment": ("DisturbedEnvironment",),
    "stress": ("StressResult", "read_stress", "stress_policy"),
}

__all__ = [
    "DisturbanceSpace", "DisturbedEnvironment", "StressResult", "make_space", "read_stress", "record_failures",
    "stress_policy",
]  # fmt: skip
__getattr__, __dir__ = lazily(__name__, _HOMES)
