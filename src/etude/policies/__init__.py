"""What is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.policies.mlp import MLP

__all__ = ["MLP"]


def __getattr__(name: str) -> Any:
    if name == "MLP":
        from etude.policies.mlp import MLP

        return MLP
    raise AttributeError(f"module 'etude.policies' has no attribute {name!r}")
