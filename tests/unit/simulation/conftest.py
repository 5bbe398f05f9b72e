"""Small policies that act in small environments."""

from __future__ import annotations

import pytest
import torch

from etude.policies.base import PolicyModule
from etude.rng import generators_kept
from etude.types import DataSpec, Feature

PENDULUM = "gym:Pendulum-v1"
OPTIONS = {"render": False, "max_steps": 12}


def pendulum_spec() -> DataSpec:
    stats = {"mean": [0.0], "std": [1.0], "min": [-2.0], "max": [2.0], "q01": [-2.0], "q99": [2.0]}
    state = {name: values * 3 for name, values in stats.items()}
    return DataSpec(
        {
            "observation.state": Feature((3,), "float32", "state", stats=state),
            "action": Feature((1,), "float32", "action", stats=stats),
        },
        30.0,
    )


def build(policy: PolicyModule) -> PolicyModule:
    with generators_kept():
        torch.manual_seed(0)
        policy.build(pendulum_spec())
    return policy


@pytest.fixture
def mlp() -> PolicyModule:
    from etude.policies.mlp import MLP

    return build(MLP(hidden=[32], chunk_size=4, n_action_steps=3, n_obs_steps=2))


@pytest.fixture
def noisy() -> PolicyModule:
    """A policy that draws random numbers whenever it acts."""
    from etude.policies.flow import FlowMatching

    return build(
        FlowMatching(horizon=4, n_action_steps=2, head="dit", n_layers=1, hidden_dim=16, num_inference_steps=2)
    )
