"""`ReadOptions`: what to read of a dataset on disk, said once for all that open one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from etude.signatures.nested import ParametersOf


@dataclass(frozen=True)
class ReadOptions:
    """What to read of a dataset on disk, how strictly, and how much of it to keep decoded."""

    cameras: Sequence[str] | None = None
    """Which cameras to use; None means all, an empty list none."""
    features: Sequence[str] | None = None
    """Which features to use, by name or pattern such as observation.*; None means all."""
    exclude: Sequence[str] | None = None
    """Which of them to leave out, by name or pattern."""
    cache_gb: float = 4.0
    """How many decoded frames of each dataset to keep on disk, in 1e9 bytes."""
    cache_dir: str | Path | None = None
    """Where caches go; $ETUDE_CACHE or ~/.cache/etude if None."""
    tolerance_s: float | None = None
    """How far a timestamp may be off; a tenth of a frame if None."""
    cross_check: bool = True
    """Compare the data with what was noted about each episode, and refuse what differs."""
    show_progress: bool = True
    """Show in a terminal how decoding gets on."""


ReadKeywords = Annotated[Any, ParametersOf("etude.data.lerobot.options:ReadOptions")]
"""Says that `**keywords` are fields of `ReadOptions`."""
