"""Ray: workers of Ray Train, on this machine or on a cluster, that run the torch engine's session.

Inside this package `import ray` means the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.engines.ray.engine import RayEngine

__all__ = ["RayEngine"]
__getattr__, __dir__ = lazily(__name__, {"engine": __all__})
