"""Models from YAML: modules and operations joined to one `nn.Module`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.policies.graph.build import build_model
    from etude.policies.graph.components import MODULE_REGISTRY
    from etude.policies.graph.model import GraphModel

__all__ = ["MODULE_REGISTRY", "GraphModel", "build_model"]

__getattr__, __dir__ = lazily(
    __name__, {"build": ("build_model",), "components": ("MODULE_REGISTRY",), "model": ("GraphModel",)}
)
