"""Callbacks that several tests share."""

from __future__ import annotations

import os
from collections.abc import Mapping

from etude import Callback, Trainer


class KeepRows(Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))


class DieAt(Callback):
    """Kills its process after a step, once the checkpoint of that step is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        if trainer.progress.step == self.step:
            trainer.session.record.wait()
            os.kill(os.getpid(), 9)
