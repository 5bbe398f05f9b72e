"""Calculate as training below float32 does; run as a program, to see whether this CPU survives it.

Sizes matter: up to 16 x 16 x 16 torch multiplies by itself, and attention packs its blocks from some length on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPES = (torch.bfloat16, torch.float16)


def calculate(dtype: torch.dtype) -> None:
    """Run matrix products, convolutions and attention, there and back, with such weights and under autocast."""
    for weights, autocast in ((dtype, False), (torch.float32, True)):
        image, line, dense = nn.Conv2d(3, 32, 3, padding=1), nn.Conv1d(32, 64, 3), nn.Linear(64, 192)
        layers = nn.ModuleList([image, line, dense, nn.LayerNorm(64)]).to(weights)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            pixels: Tensor = image(torch.randn(4, 3, 16, 16, dtype=weights)).flatten(2)
            rows: Tensor = layers[3](line(pixels).transpose(1, 2))
            query, key, value = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in dense(rows).chunk(3, -1))
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            product = seen.flatten(0, 2) @ seen.flatten(0, 2)[:256].transpose(0, 1)
        torch.autograd.backward(product.float().square().mean())


if __name__ == "__main__":
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death is an answer here, nothing to keep
    except (ImportError, OSError, ValueError):
        pass
    torch.set_num_threads(1)
    for kind in DTYPES:
        calculate(kind)
