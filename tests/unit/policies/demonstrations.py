"""Small demonstrations for the tests of generative policies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from etude.data.windows import Windows
from etude.types import DataSpec, Feature

STATE, ACTION = "observation.state", "action"


def stats(low: list[float], high: list[float]) -> dict[str, list[float]]:
    middle = [(a + b) / 2 for a, b in zip(low, high)]
    return {
        "min": low,
        "max": high,
        "mean": middle,
        "std": [(b - a) / 4 for a, b in zip(low, high)],
        "q01": low,
        "q99": high,
    }


def make_spec(state: int = 3, action: int = 2, **more: Feature) -> DataSpec:
    features = {
        STATE: Feature((state,), role="state", stats=stats([-1.0] * state, [1.0] * state)),
        ACTION: Feature((action,), role="action", stats=stats([-4.0] * action, [2.0] * action)),
    }
    return DataSpec({**features, **more}, 10.0)


def make_batch(policy: Any, batch: int = 6, seed: int = 0, state: int = 3, action: int = 2) -> dict[str, Tensor]:
    """Observations in -1..1, actions in -4..2, the last steps of some samples padded."""
    draw = torch.Generator().manual_seed(seed)
    steps = len(policy.action_delta_indices)
    lead = (batch,) if policy.observation_delta_indices is None else (batch, len(policy.observation_delta_indices))
    is_pad = torch.arange(steps).expand(batch, -1) >= steps - torch.arange(batch).unsqueeze(1) % 4
    return {
        STATE: torch.rand(*lead, state, generator=draw) * 2 - 1,
        ACTION: torch.rand(batch, steps, action, generator=draw) * 6 - 4,
        f"{ACTION}_is_pad": is_pad,
    }


def make_windows(policy: Any, episodes: int = 3, length: int = 20) -> Windows:
    """Episodes in which the action is a smooth function of the state, as windows the policy asks for."""
    draw = torch.Generator().manual_seed(0)
    phases = torch.rand(episodes, 1, generator=draw) * 6 + torch.arange(length) * 0.3
    states = torch.stack([phases.sin(), phases.cos(), phases.sin() * phases.cos()], dim=-1).flatten(0, 1)
    actions = torch.stack([states[:, 0] * 3 - 1, states[:, 1] + states[:, 2]], dim=-1)
    deltas = {ACTION: policy.action_delta_indices}
    if policy.observation_delta_indices is not None:
        deltas[STATE] = policy.observation_delta_indices
    ends = [length * (i + 1) for i in range(episodes)]
    return Windows({STATE: states, ACTION: actions}, ends, deltas, fps=10.0)
