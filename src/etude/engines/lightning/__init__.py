"""Lightning: a Trainer for people who come from it, and an engine for everyone else.

Inside this package `import lightning` means the library.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.engines.lightning.checkpoint import load_checkpoint as load_checkpoint
    from etude.engines.lightning.checkpoint import load_policy as load_policy
    from etude.engines.lightning.engine import LightningEngine as LightningEngine
    from etude.engines.lightning.interaction import PolicyDatasetInteraction as PolicyDatasetInteraction
    from etude.engines.lightning.trainer import Trainer as Trainer

# torch 2.13 warns about how Lightning 2.6 makes its loaders; nobody who uses Lightning can do anything about it.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)

_HOMES = {
    "LightningEngine": "engine",
    "PolicyDatasetInteraction": "interaction",
    "Trainer": "trainer",
    "load_checkpoint": "checkpoint",
    "load_policy": "checkpoint",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lightning":
            raise
        from etude.errors import MissingExtraError

        raise MissingExtraError(f"{name} needs Lightning; run: pip install 'etude[lightning]'") from error
    globals()[name] = value
    return value
