"""Who teaches in on-policy distillation: the one teacher that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from etude.algorithms.distillation import ready_teacher
from etude.errors import ConfigError
from etude.service.settings import Settings, train_service

_UNUSED = ("base_url", "api_key", "backend")


def find_teacher(settings: Settings) -> Any:
    """Return the teacher: a policy, the path of a language model, or None where none is named.

    Looked for in `teachers` (a list of one) and in the training service with `role: teacher`.
    """
    listed = settings.get("teachers")
    if listed is not None:
        teachers = [listed] if isinstance(listed, Settings | Mapping) else list(listed)
        if len(teachers) != 1:
            raise ConfigError(f"teachers: {len(teachers)} are named; one teaches, so name one")
        if not isinstance(teachers[0], Settings | Mapping):
            return teachers[0]  # a policy, or a path
        named = Settings.of(teachers[0])
        remote = next((name for name in _UNUSED if named.get(name) not in (None, "")), None)
        if remote is not None:
            raise ConfigError(
                f"teachers.0.{remote}: the teacher is computed in this process; give base_model (a path) or checkpoint"
            )
        return _model(named.get("checkpoint") or named.get("base_model"), "teachers.0.base_model")
    service = train_service(settings, "teacher")
    if not service:
        return None
    actor = service.section("actor").section("model")
    return _model(service.get("model") or actor.get("path"), "the teacher's model")


class Teacher:
    """The teacher of a trainer, loaded when it is first asked for; no part of what the trainer keeps."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._policy: Any = None

    def on(self, device: torch.device) -> Any:
        """Return the teacher's policy on a device."""
        found = find_teacher(self._settings) if self._policy is None else self._policy
        if found is None:
            raise ConfigError("distillation needs a teacher: teachers: [{base_model: path}]")
        self._policy = ready_teacher(found, device)
        return self._policy


def _model(given: Any, what: str) -> Any:
    if given is None:
        raise ConfigError(f"{what} is missing: the path of a language model, or a policy")
    return given
