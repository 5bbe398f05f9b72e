"""Draw the weights of a model anew: Xavier for convolutions, Kaiming for linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

EMBEDDING_STD = 0.02
"""Spread of embeddings, as language models draw them; torch's own 1.0 drowns what is added to it."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


@torch.no_grad()
def initialize_weights(model: nn.Module) -> None:
    """Initialise every layer of torch that has weights; other parameters stay as their modules made them."""
    for module in model.modules():
        _initialize(module)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, _ConvNd | nn.Bilinear):
        init.xavier_uniform_(module.weight)
        _zero(module.bias)
    elif isinstance(module, nn.Linear):
        init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        _zero(module.bias)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        init.normal_(module.weight, std=EMBEDDING_STD)
        if module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
    elif isinstance(module, nn.MultiheadAttention):  # whose output projection is a linear layer of its own
        for weight in (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
            if weight is not None:
                init.xavier_uniform_(weight)
        _zero(module.in_proj_bias)
        for bias in (module.bias_k, module.bias_v):
            if bias is not None:
                init.xavier_normal_(bias)
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        for name, parameter in module.named_parameters(recurse=False):
            init.xavier_uniform_(parameter) if name.startswith("weight") else init.zeros_(parameter)
    elif isinstance(module, _NORMS):
        if isinstance(module, _NormBase):
            module.reset_running_stats()
        if getattr(module, "weight", None) is not None:
            init.ones_(module.weight)
        _zero(getattr(module, "bias", None))


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        init.zeros_(bias)
