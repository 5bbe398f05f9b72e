"""A policy small enough for finite differences, and batches for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from etude.types import Batch, Trajectory

VOCABULARY = 7


class LogProbs(NamedTuple):
    log_probs: Tensor
    values: Tensor | None = None
    entropy: Tensor | None = None


class Bigram(nn.Module):
    """Predicts a token from the one before it; what the mask leaves out is NaN, to see that nobody looks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64))
            self.value = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))
        self.frozen: Bigram | None = None

    def logits(self, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        before = torch.cat((torch.zeros_like(ids[:, :1]), ids[:, :-1]), 1)
        return self.table[before]

    def log_probs(
        self, batch: Any, *, temperature: float = 1.0, with_values: bool = False, with_entropy: bool = False
    ) -> Any:
        ids, mask = batch["input_ids"], batch["loss_mask"] != 0
        before = torch.cat((torch.zeros_like(ids[:, :1]), ids[:, :-1]), 1)
        every = (self.table[before] / temperature).log_softmax(-1)
        found = torch.where(mask, every.gather(-1, ids[..., None]).squeeze(-1), torch.nan)
        if not (with_values or with_entropy):
            return found
        entropy = torch.where(mask, -(every.exp() * every).sum(-1), torch.nan)
        return LogProbs(found, torch.where(mask, self.value[before], torch.nan), entropy)

    @contextmanager
    def reference(self) -> Iterator[Bigram]:
        if self.frozen is None:
            object.__setattr__(self, "frozen", Bigram(seed=99).requires_grad_(False))
        with torch.no_grad():
            yield self.frozen


def rollouts(rows: int = 6, group: int = 3, seed: int = 0) -> Batch:
    """Completions of different lengths with rewards; rows of one group share a prompt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(rows):
        prompt = [(1 + i // group) % VOCABULARY, 2]
        count = 1 + int(torch.randint(4, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        logprobs = (-3 * torch.rand(count, generator=generator)).tolist()
        reward = float(torch.randint(5, (), generator=generator))
        fields = {"group_id": i // group, "run_id": i % group, "greedy_rewards": 1.0 + i // group}
        mask = [0] * len(prompt) + [1] * count
        made.append(Trajectory(prompt + tokens, mask, reward, extra_fields={**fields, "logprobs": logprobs}))
    batch = Batch.from_trajectories(made)
    for name in ("old_log_probs", "loss_mask"):
        batch.values[name] = batch.values[name].double()
    batch.metadata["rewards"] = batch.metadata["rewards"].double()
    return batch


def pairs(count: int = 3, seed: int = 0) -> Batch:
    """Chosen and rejected completions of one prompt each, of different lengths."""
    chosen, rejected = rollouts(count, 1, seed), rollouts(count, 1, seed + 1)
    values = {}
    for side, batch in (("chosen", chosen), ("rejected", rejected)):
        values |= {f"{side}_{name}": batch.values[name] for name in ("input_ids", "attention_mask", "loss_mask")}
    return Batch(values)


def labelled(count: int = 4, seed: int = 0) -> Batch:
    """Desirable and undesirable completions, with completions of other prompts beside them."""
    own, other = rollouts(count, 1, seed), rollouts(count, 1, seed + 1)
    values = {name: own.values[name] for name in ("input_ids", "attention_mask", "loss_mask")}
    values |= {f"mismatched_{name}": other.values[name] for name in values}
    return Batch(values | {"label": (torch.arange(count) % 2 == 0).double()})


def gradients(algorithm: Any, policy: Bigram, batch: Batch, *, parts: int = 0) -> tuple[float, float, list[Tensor]]:
    """Return (total, weight, gradients of the total), over one batch or over parts of so many rows."""
    policy.zero_grad()
    total = weight = 0.0
    for part in batch.split(parts) if parts else [batch]:
        loss = algorithm.loss(policy, part)
        loss.total.backward()
        total, weight = total + float(loss.total.detach()), weight + float(loss.weight)
    return total, weight, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.parameters()]


def moved(policy: Bigram) -> Bigram:
    """Return a copy of the policy a small step away, so that ratios are not 1."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.table += 0.3 * torch.sin(torch.arange(other.table.numel(), dtype=torch.float64)).view_as(other.table)
    return other


def assert_close(found: Any, expected: Any, *, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Compare tensors, or lists of them; `torch.testing` takes five seconds to import what it does not need here."""
    if isinstance(found, Tensor):
        found, expected = [found], [expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.detach().numpy(), other.detach().numpy(), rtol=rtol, atol=atol)
