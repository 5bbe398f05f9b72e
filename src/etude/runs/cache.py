"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return where caches go: `$ETUDE_CACHE`, or `etude` in the user's cache directory."""
    if chosen := os.environ.get("ETUDE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
