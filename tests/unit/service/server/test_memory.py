"""Models on one base share its weights: one more costs its adapters and what the optimizer remembers of them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from etude.policies.language import Sampling
from etude.service.datums import AdamParams
from etude.service.server.bases import Adapter, Bases
from etude.service.server.codec import DatumRow, Work
from etude.service.server.trained import TrainedModel

pytest.importorskip("peft")


def held_bytes() -> int:
    """Return the bytes of all tensors that are alive, shared memory once."""
    gc.collect()
    found = {}
    for one in gc.get_objects():  # those of other tests are there too, whatever they are
        if type(one) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            continue
        if one.device.type == "cpu" and one.layout == torch.strided:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def trained(bases: Bases, seed: int) -> TrainedModel:
    """Return a model that has made a step, and has been drawn from."""
    model = TrainedModel(bases.make("tiny", Adapter(8, seed)))
    tokens = list(range(5, 25))
    row = DatumRow(tokens, {"target_tokens": torch.tensor([*tokens[1:], 0]), "weights": torch.ones(len(tokens))})
    model.run(Work("m", 1, [row], "cross_entropy", {}, forward_only=False))
    model.step(AdamParams(learning_rate=1e-3))
    model.policy.generate([tokens], Sampling(max_new_tokens=4), n=2)
    return model


def test_one_more_model_costs_its_adapters_and_its_optimizer() -> None:
    bases = Bases(["tiny"])
    kept: list[Any] = [trained(bases, 0)]
    own = 3 * sum(one.numel() * one.element_size() for one in kept[0].weights().values())
    base = sum(one.numel() * one.element_size() for one in bases.get("tiny").parameters())
    assert 1.2 * own < base  # or a copy of the base would not be noticed
    held = [held_bytes()]
    for seed in range(1, 8):
        kept.append(trained(bases, seed))
        held.append(held_bytes())
    assert held[1] - held[0] <= 1.2 * own
    assert held[7] - held[0] <= 7 * 1.2 * own
    assert held[7] - held[0] >= 7 * own  # what was counted is what is trained
