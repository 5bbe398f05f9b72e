"""Trainers that are made from one configuration, and held by a `Trainer` of ours: no second loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.service.base import BaseTrainer
    from etude.service.hold import ServiceTrainer
    from etude.service.in_process import InProcessService
    from etude.service.ready_remote import RemoteApiCrossEntropyTrainer, RemoteApiGrpoTrainer, RemoteApiOpdTrainer
    from etude.service.ready_self_hosted import (
        SelfHostedCrossEntropyTrainer,
        SelfHostedGrpoTrainer,
        SelfHostedOpdTrainer,
    )
    from etude.service.remote import RemoteApiTrainer, group_by
    from etude.service.self_hosted import SelfHostedTrainer
    from etude.service.settings import Settings

__all__ = ["BaseTrainer", "InProcessService", "RemoteApiCrossEntropyTrainer", "RemoteApiGrpoTrainer"]
__all__ += ["RemoteApiOpdTrainer", "RemoteApiTrainer", "SelfHostedCrossEntropyTrainer", "SelfHostedGrpoTrainer"]
__all__ += ["SelfHostedOpdTrainer", "SelfHostedTrainer", "ServiceTrainer", "Settings", "group_by"]

_HOMES = {
    "base": ("BaseTrainer",),
    "hold": ("ServiceTrainer",),
    "in_process": ("InProcessService",),
    "ready_remote": ("RemoteApiCrossEntropyTrainer", "RemoteApiGrpoTrainer", "RemoteApiOpdTrainer"),
    "ready_self_hosted": ("SelfHostedCrossEntropyTrainer", "SelfHostedGrpoTrainer", "SelfHostedOpdTrainer"),
    "remote": ("RemoteApiTrainer", "group_by"),
    "self_hosted": ("SelfHostedTrainer",),
    "settings": ("Settings",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
