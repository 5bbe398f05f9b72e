"""The one door from here to the reader of configurations."""

from __future__ import annotations

from etude.config.yaml12 import MAX_BYTES, MAX_DEPTH, MAX_NODES, Mark, ReadError, as_config_error, read, read_bytes
from etude.registry import did_you_mean

__all__ = [
    "MAX_BYTES", "MAX_DEPTH", "MAX_NODES", "Mark", "ReadError", "as_config_error", "did_you_mean", "read", "read_bytes",
]  # fmt: skip
