"""Where a policy comes from: the run that trained it and the checkpoint that was taken; kept with results and cards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ATTRIBUTE = "_etude_origin"


@dataclass(frozen=True, slots=True)
class PolicyOrigin:
    """The run and the step that a policy's weights are of."""

    run: Path
    step: int
    which: str = ""
    """Which checkpoint it was, such as best or last; empty for weights that no checkpoint was asked for."""

    def __str__(self) -> str:
        return f"{self.which} checkpoint, step {self.step}" if self.which else f"step {self.step}"


def set_origin(policy: Any, origin: PolicyOrigin) -> None:
    """Note where a policy comes from."""
    setattr(policy, _ATTRIBUTE, origin)


def origin_of(policy: Any) -> PolicyOrigin | None:
    """Return where a policy comes from, if that was noted."""
    found = getattr(policy, _ATTRIBUTE, None)
    return found if isinstance(found, PolicyOrigin) else None
