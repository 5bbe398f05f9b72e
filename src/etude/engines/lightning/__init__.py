"""Lightning: a Trainer for people who come from it, and an engine for everyone else.

Inside this package `import lightning` means the library.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.config.restore import load_policy as load_policy
    from etude.engines.lightning.checkpoint import load_checkpoint as load_checkpoint
    from etude.engines.lightning.engine import LightningEngine as LightningEngine
    from etude.engines.lightning.interaction import PolicyDatasetInteraction as PolicyDatasetInteraction
    from etude.engines.lightning.trainer import Trainer as Trainer

# torch 2.13 warns about how Lightning 2.6 makes its loaders; nobody who uses Lightning can do anything about it.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)

_HOMES = {
    "..config.restore": ("load_policy",),
    "checkpoint": ("load_checkpoint",),
    "engine": ("LightningEngine",),
    "interaction": ("PolicyDatasetInteraction",),
    "trainer": ("Trainer",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605
__getattr__, __dir__ = lazily(__name__, _HOMES, {"lightning": "lightning"})
