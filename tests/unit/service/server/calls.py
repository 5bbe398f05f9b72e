"""What tests of the official client share: a sentence, its tokens, one step, and what a model then says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.service.server.bases import Bases

tinker = pytest.importorskip("tinker")
SENTENCE = "the quick brown fox"
BASES = Bases(["tiny"])


def tokens(text: str = SENTENCE) -> list[int]:
    """Return the tokens of a text and of its end."""
    return [*BASES.get("tiny").encode(text), 0]


def datum(ids: list[int] | None = None, **inputs: Any) -> Any:
    """Return a datum on a text, targets shifted by one."""
    ids = ids or tokens()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )


def adam(rate: float = 1e-2, **others: float) -> Any:
    return tinker.AdamParams(learning_rate=rate, **others)


def step(trained: Any, data: list[Any], loss_fn: str = "cross_entropy", config: Any = None, rate: float = 1e-2) -> Any:
    """Make one update, both calls sent at once, and return what the first came to."""
    done, updated = trained.forward_backward(data, loss_fn, config), trained.optim_step(adam(rate))
    updated.result()
    return done.result()


def heard(trained: Any, data: list[Any] | None = None) -> torch.Tensor:
    """Return the log-probabilities that a model in training gives."""
    found = trained.forward(data or [datum()], "cross_entropy").result().loss_fn_outputs
    return torch.cat([one["logprobs"].to_torch().flatten() for one in found])


def lora(client: Any, **options: Any) -> Any:
    return client.create_lora_training_client("tiny", **{"rank": 8, "seed": 3} | options)
