"""The one door from here to the reader of configurations."""

from __future__ import annotations

from etude.reading.suggest import did_you_mean
from etude.reading.yaml12 import MAX_BYTES, MAX_DEPTH, MAX_NODES, Mark, ReadError, as_config_error, read, read_bytes

__all__ = [
    "MAX_BYTES", "MAX_DEPTH", "MAX_NODES", "Mark", "ReadError", "as_config_error", "did_you_mean", "read", "read_bytes",
]  # fmt: skip
