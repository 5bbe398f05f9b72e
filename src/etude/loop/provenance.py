"""Which code and data a run was made with, so that one that goes on with others says so."""

from __future__ import annotations

import hashlib
import inspect
import logging
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from etude.data.fingerprint import describe_change, fingerprint
from etude.policies.pretrained import own_class

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")


def describe_trainer(trainer: Trainer) -> dict[str, Any]:
    """Return hashes of the user's own code behind trainer, policy and algorithm, and what tells the data apart."""
    algorithm = getattr(trainer.algorithm, "solver", trainer.algorithm)  # the user's own, behind what calls it
    return describe(
        trainer.data,
        trainer=[type(trainer)],
        policy=map(own_class, trainer.policy.modules()),
        algorithm=[algorithm if inspect.isroutine(algorithm) else type(algorithm)],
    )


def describe(data: Any, **parts: Iterable[Any]) -> dict[str, Any]:
    """Return hashes of the user's own code behind each part, and what tells the data apart."""
    return {"code": {name: _hashes(objects) for name, objects in parts.items()}, "data": fingerprint(data)}


def say_changes(before: Any, now: Mapping[str, Any]) -> None:
    """Say what differs from the session that made a checkpoint; where nothing is described, nothing is said."""
    for change in changes(before, now) if now else ():
        log.warning("changed since the last session: %s", change)


def changes(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Return in words what differs from the session that made a checkpoint; what is not known does not differ."""
    if not isinstance(before, Mapping):
        return []
    found = []
    for part, hashes in now["code"].items():
        earlier = (before.get("code") or {}).get(part)
        if not earlier or not hashes or earlier == hashes:
            continue
        names = sorted(name for name in {*earlier, *hashes} if earlier.get(name) != hashes.get(name))
        found.append(f"the code of the {part} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    data = describe_change(before.get("data"), now["data"])
    return [*found, data] if data else found


def _hashes(objects: Iterable[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for thing in dict.fromkeys(objects):
        for owner in thing.__mro__ if isinstance(thing, type) else [thing]:
            text = _source(owner)
            if text is not None:
                found[owner.__qualname__.replace("<locals>.", "")] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _source(thing: Any) -> str | None:
    """Return the source of a class or function of the user's; None for installed ones, and where there is none."""
    if str(getattr(thing, "__module__", "")).split(".")[0] in ("etude", "builtins") or thing is nn.Module:
        return None
    try:
        file = inspect.getsourcefile(thing)
        if file is None or file.startswith(_installed()):
            return None
        return inspect.getsource(thing)
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


@cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
