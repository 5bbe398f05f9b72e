"""What `_type_` may name: the modules of `torch.nn`, our blocks, and those of the modules a file imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from etude.errors import RegistryError
from etude.plugins import is_plugin_file
from etude.policies.graph.schema import GraphSettings
from etude.policies.graph.tree import Item
from etude.reading.suggest import did_you_mean
from etude.registry import Registry, load_plugins

_BLOCKS = "etude.policies.graph.blocks"
_BACKBONES = "etude.policies.graph.backbones"
_LATENTS = "etude.policies.graph.latents"

MODULE_REGISTRY: Final[Registry[nn.Module]] = Registry(
    "modules",
    ("forward",),
    {
        "conv": f"{_BLOCKS}:Conv",
        "conv_bn_act": f"{_BLOCKS}:Conv",
        "cross_attention": f"{_BLOCKS}:CrossAttention",
        "dinov2": f"{_BACKBONES}:dinov2",
        "dit": "etude.policies.dit:DiT",
        "film": f"{_BLOCKS}:FiLM",
        "gate": f"{_LATENTS}:Gate",
        "gaussian_posterior": f"{_LATENTS}:Gaussian",
        "gaussian_prior": f"{_LATENTS}:Gaussian",
        "learned_tokens": f"{_BLOCKS}:LearnedTokens",
        "mixture_of_experts": f"{_LATENTS}:MixtureOfExperts",
        "mlp": f"{_BLOCKS}:Perceptron",
        "positional_embedding": f"{_BLOCKS}:PositionalEmbedding",
        "residual": f"{_BLOCKS}:Residual",
        "residual_block": f"{_BLOCKS}:Residual",
        "resnet": f"{_BACKBONES}:resnet",
        "siglip": f"{_BACKBONES}:siglip",
        "time_embedding": f"{_BLOCKS}:TimeEmbedding",
        "transformer_decoder": f"{_BLOCKS}:TransformerDecoder",
        "transformer_encoder": f"{_BLOCKS}:TransformerEncoder",
        "unet1d": "etude.policies.unet1d:ConditionalUnet1D",
        "vit": f"{_BACKBONES}:vit",
        "vq_codebook": f"{_LATENTS}:Codebook",
    },
    noun="module",
)

_TORCH: Final = {
    name: found for name, found in vars(nn).items() if isinstance(found, type) and issubclass(found, nn.Module)
}
_registered: set[str] = set()
"""Modules whose `register` was called."""


def find_component(item: Item) -> Callable[..., Any]:
    """Return the class or function that `_type_` names: a registered key, or a module of `torch.nn`."""
    key = item.text("_type_")
    if key in MODULE_REGISTRY:
        return MODULE_REGISTRY.get(key)
    name = key.removeprefix("torch.").removeprefix("nn.")
    if name in _TORCH:
        return _TORCH[name]
    near = did_you_mean(key, [*MODULE_REGISTRY.keys(), *(f"nn.{one}" for one in _TORCH), *_TORCH])
    known = f"; known: {', '.join(MODULE_REGISTRY.keys())} and every module of torch.nn"
    raise RegistryError(f"{item.place}: unknown module {key[:80]!r}{near or known}")


def run_imports(item: Item, settings: GraphSettings, *, allowed: bool) -> None:
    """Import what a file lists, once in a process; an error leaves the registry as it was."""
    for one in item.listed("imports"):
        name = one.text("an import")
        if not allowed or not settings.allow_imports:
            by = "by the caller: build_model(..., allow_imports=True)" if not allowed else "by settings.allow_imports"
            raise one.place.error(f"imports are not allowed {by}")
        prefixes = settings.allowed_import_prefixes
        if prefixes is not None and not name.startswith(prefixes):
            raise one.place.error(f"{name[:80]!r} begins with none of settings.allowed_import_prefixes")
        before = dict(MODULE_REGISTRY._entries)
        try:
            load_plugins([name])
            _call_register(name)
        except (RegistryError, TypeError, AttributeError) as error:
            MODULE_REGISTRY._entries = before
            raise RegistryError(f"{one.place}: {error}") from error


def _call_register(name: str) -> None:
    """Call `register(registry)` of an imported module that has one, as the first that imports it."""
    module = None if is_plugin_file(name) else sys.modules.get(name)
    register = getattr(module, "register", None)
    if callable(register) and name not in _registered:
        register(MODULE_REGISTRY)
        _registered.add(name)
