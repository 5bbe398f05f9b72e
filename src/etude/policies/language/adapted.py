"""Linear layers and embeddings as tensors: the weight, and beside it the two small ones of plain LoRA adapters.

Whoever computes without the modules reads them here. The product of the small ones is never written out: as large as
the weight itself, it would cost a copy of the model for each of those that share one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Adapted(NamedTuple):
    """The map x W' + scale (x down') up'; without adapters only W."""

    weight: Tensor
    down: Tensor | None = None
    """(rank, inputs)."""
    up: Tensor | None = None
    """(outputs, rank)."""
    scale: float = 1.0

    @property
    def scaled_up(self) -> Tensor | None:
        """The second small matrix, with the scale in it."""
        return self.up if self.up is None or self.scale == 1.0 else self.up * self.scale


def is_plain(module: Any) -> bool:
    """Tell whether a layer is linear, or linear with plain LoRA adapters."""
    if type(module) is torch.nn.Linear:
        return True
    if type(getattr(module, "base_layer", None)) is not torch.nn.Linear or not hasattr(module, "lora_A"):
        return False
    if getattr(module, "lora_variant", None) or any(getattr(module, "lora_bias", {}).values()):
        return False
    return all(name in module.lora_A for name in module.active_adapters)


def is_plain_embedding(module: Any) -> bool:
    """Tell whether a layer is an embedding, or one with plain LoRA adapters."""
    if type(module) is torch.nn.Embedding:
        return True
    if type(getattr(module, "base_layer", None)) is not torch.nn.Embedding or getattr(module, "lora_variant", None):
        return False
    return all(name in module.lora_embedding_A for name in module.active_adapters)


def has_dropout(module: Any) -> bool:
    """Tell whether the adapters of a layer leave some of their inputs out, as they do in training alone."""
    return any(one.training and getattr(one, "p", 0.0) for one in getattr(module, "lora_dropout", {}).values())


def read(module: Any) -> Adapted:
    """Return what a plain layer computes with: adapters where they are switched on, several of them side by side."""
    if not hasattr(module, "base_layer"):
        return Adapted(module.weight)
    weight: Tensor = module.base_layer.weight
    names = () if module.disable_adapters or module.merged else tuple(module.active_adapters)
    if not names:
        return Adapted(weight)
    if type(module.base_layer) is torch.nn.Embedding:
        # An embedding looks up rows of the weight: those are its inputs, and the small matrices change places.
        pairs = [(module.lora_embedding_B[name].t(), module.lora_embedding_A[name].t()) for name in names]
    else:
        pairs = [(module.lora_A[name].weight, module.lora_B[name].weight) for name in names]
    scales = [float(module.scaling[name]) for name in names]
    if len(names) == 1:
        return Adapted(weight, *pairs[0], scales[0])
    return Adapted(
        weight,
        torch.cat([down for down, _ in pairs]),
        torch.cat([up * scale for (_, up), scale in zip(pairs, scales, strict=True)], 1),
    )


def merged_weight(given: Adapted) -> Tensor:
    """Return the one weight that does the same."""
    if given.down is None or given.up is None:
        return given.weight
    return torch.addmm(given.weight, given.up, given.down, alpha=given.scale)
