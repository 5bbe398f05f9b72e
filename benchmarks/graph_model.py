"""CPU time of a training step of a model from YAML over the same modules called by hand, one thread, in turns."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from etude.policies.graph import build_model

GOAL = 1.03
ROUNDS, STEPS = 60, 10
WIDTH, TOKENS, BATCH = 64, 16, 32

MODEL: dict[str, Any] = {
    "schema_version": 1,
    "model": {
        "graph": {
            "inputs": {"state": ["B", 8], "tokens": ["B", TOKENS, WIDTH]},
            "modules": {
                "inward": {"_type_": "mlp", "in_features": 8, "out_features": WIDTH, "hidden": [WIDTH]},
                "places": {"_type_": "positional_embedding", "width": WIDTH, "length": TOKENS + 1},
                "encoder": {"_type_": "transformer_encoder", "width": WIDTH, "depth": 1},
                "head": {"_type_": "mlp", "in_features": WIDTH, "out_features": 4, "hidden": [WIDTH]},
            },
            "nodes": [
                {"name": "one", "call": "module:inward", "args": ["$state"]},
                {"name": "token", "call": "op:unsqueeze", "args": ["$one", 1]},
                {"name": "all", "call": "op:cat", "args": [["$token", "$tokens"]], "kwargs": {"dim": 1}},
                {"name": "placed", "call": "module:places", "args": ["$all"]},
                {"name": "seen", "call": "module:encoder", "args": ["$placed"]},
                {"name": "pooled", "call": "op:mean", "args": ["$seen", 1]},
                {"name": "out", "call": "module:head", "args": ["$pooled"]},
            ],
            "outputs": ["$out"],
        }
    },
}


class ByHand(nn.Module):
    """The same calls of the same modules, written out."""

    def __init__(self, modules: nn.ModuleDict) -> None:
        super().__init__()
        self.inward, self.places = modules["inward"], modules["places"]
        self.encoder, self.head = modules["encoder"], modules["head"]

    def forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the output."""
        every = torch.cat([self.inward(state).unsqueeze(1), tokens], dim=1)
        out: Tensor = self.head(self.encoder(self.places(every)).mean(1))
        return out


def measure(rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the ratio of the fastest rounds, and the median of the ratios of all rounds."""
    torch.manual_seed(0)
    model = build_model(MODEL)
    hand = ByHand(model.graph_modules)
    inputs = torch.randn(BATCH, 8), torch.randn(BATCH, TOKENS, WIDTH)

    def once(module: nn.Module) -> int:
        began = time.process_time_ns()
        for _ in range(STEPS):
            module(*inputs).square().sum().backward()
        return time.process_time_ns() - began

    pairs = [(once(model), once(hand)) for _ in range(rounds)]
    fastest = min(own for own, _ in pairs) / min(other for _, other in pairs)
    return fastest, statistics.median(own / other for own, other in pairs)


def main() -> float:
    """Print the ratio and return it."""
    fastest, median = measure()
    print(f"graph over hand: {fastest:.3f} (fastest rounds), {median:.3f} (median); goal {GOAL}")
    return fastest


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
