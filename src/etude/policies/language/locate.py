"""Where a model is: in a directory, in the hub's cache, or on the hub. A name that is in none of them fails at once."""

from __future__ import annotations

import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etude.errors import CheckpointError, ConfigError
from etude.extras import import_extra
from etude.reading.suggest import did_you_mean

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
PATIENCE_S = 3.0
"""Seconds that the hub may take to answer; transformers tries again for a minute."""


def locate_model(given: Any) -> str:
    """Return what transformers loads a model by; refuse what is neither here nor the id of one on the hub."""
    if not isinstance(given, str | Path) or not str(given):
        raise ConfigError(f"a model is given by a directory, a hub id or smollm2, got {given!r}")
    path = Path(given).expanduser()
    if path.exists():
        return str(path)
    name = str(given)
    is_id = HUB_ID.fullmatch(name) is not None and not Path(name.split("/")[0]).is_dir()
    if _is_cached(name):
        return name
    problem = f"cannot load a language model from {name!r}: there is no such directory"
    if not is_id:
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise CheckpointError(f"{problem}{near or '; a model on the Hugging Face hub is named owner/name'}")
    reason = _why_not_hub()
    if reason:
        raise CheckpointError(f"{problem}, and it cannot be fetched from the Hugging Face hub: {reason}")
    return name


def _is_cached(name: str) -> bool:
    hub = import_extra("huggingface_hub", "llm")
    try:
        return isinstance(hub.try_to_load_from_cache(name, "config.json"), str)
    except (ValueError, OSError):  # not an id at all
        return False


def _why_not_hub() -> str | None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return None  # whether it can be reached through a proxy is for the proxy to say
    place = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = place.port or (80 if place.scheme == "http" else 443)
    answered = threading.Event()

    def knock() -> None:
        try:
            socket.create_connection((place.hostname or "", port), timeout=PATIENCE_S).close()
        except OSError:
            return
        answered.set()

    # In a thread: looking up a name cannot be given a time limit.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return None if answered.is_set() else f"{place.hostname} does not answer"
