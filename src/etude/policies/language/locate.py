"""Where a model is: in a directory, in the hub's cache, or on the hub. A name that is in none of them fails at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.errors import CheckpointError, ConfigError
from etude.policies.hub import is_cached, is_hub_id, why_no_hub
from etude.reading.suggest import did_you_mean


def locate_model(given: Any) -> str:
    """Return what transformers loads a model by; refuse what is neither here nor the id of one on the hub."""
    if not isinstance(given, str | Path) or not str(given):
        raise ConfigError(f"a model is given by a directory, a hub id or smollm2, got {given!r}")
    path = Path(given).expanduser()
    if path.exists():
        return str(path)
    name = str(given)
    if is_cached(name):
        return name
    problem = f"cannot load a language model from {name!r}: there is no such directory"
    if not is_hub_id(name):
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise CheckpointError(f"{problem}{near or '; a model on the Hugging Face hub is named owner/name'}")
    reason = why_no_hub()
    if reason:
        raise CheckpointError(f"{problem}, and it cannot be fetched from the Hugging Face hub: {reason}")
    return name
