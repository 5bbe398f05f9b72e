"""Trajectories as plain values, so that those that wait can be part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.rollouts.tasks import Task
from etude.types.trajectory import Trajectory


def to_plain(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a trajectory, its task as a mapping; what a checkpoint cannot keep, it refuses by name."""
    fields = dict(trajectory.items())
    task = fields.get("task")
    if isinstance(task, Task):
        fields["task"] = {**vars(task), "metadata": dict(task.metadata), "messages": list(task.messages)}
    return fields


def from_plain(fields: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory again."""
    task = fields.get("task")
    if isinstance(task, Mapping):
        fields = {**fields, "task": Task(**{**task, "messages": tuple(task["messages"])})}
    return Trajectory(**fields)
