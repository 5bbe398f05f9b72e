"""The actor-critic: draws actions as its distribution says, and knows how likely they were."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError
from etude.policies import ActorCritic, PolicyModule
from etude.registry import POLICY_REGISTRY
from etude.types import Batch, DataSpec, Feature, Trajectory

STATE = Feature((3,), "float32", "state")
CONTINUOUS = DataSpec({"observation.state": STATE, "action": Feature((2,), "float32", "action")})
DISCRETE = DataSpec({"observation.state": STATE, "action": Feature((), "int64", "action", classes=3)})


def build(spec: DataSpec, **options: Any) -> ActorCritic:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = ActorCritic(**{"hidden": [8], **options})
        policy.build(spec)
        for parameter in policy.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)  # actions far from 0, each its own deviation
    return policy


def episodes(policy: ActorCritic, lengths: tuple[int, ...] = (4, 2)) -> Batch:
    made = []
    for length in lengths:
        state = torch.randn(length, 3)
        drawn = policy.sample({"observation.state": state}, torch.rand(length, policy.draws))
        fields = {"observation.state": state, "action": drawn.actions, "logprobs": drawn.log_probs.tolist()}
        made.append(Trajectory(None, [1] * length, 0.0, extra_fields=fields))
    return Batch.from_trajectories(made)


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_log_probabilities_and_entropy_are_what_the_formulas_say(spec: DataSpec) -> None:
    torch.manual_seed(1)
    policy = build(spec)
    batch = episodes(policy)
    found = policy.log_probs(batch, with_values=True, with_entropy=True)
    mask = batch["loss_mask"].numpy() == 1
    out = policy.actor(batch["observation.state"]).detach().numpy()
    action = batch["action"].numpy()
    if spec is CONTINUOUS:
        std = np.exp(policy.log_std.detach().numpy())
        density = np.exp(-0.5 * ((action - out) / std) ** 2) / (std * math.sqrt(2 * math.pi))
        log_probs = np.log(density).sum(-1)
        entropy = np.full(mask.shape, (np.log(std) + 0.5 * math.log(2 * math.pi * math.e)).sum())
    else:
        probabilities = np.exp(out) / np.exp(out).sum(-1, keepdims=True)
        log_probs = np.log(np.take_along_axis(probabilities, action[..., None], -1))[..., 0]
        entropy = -(probabilities * np.log(probabilities)).sum(-1)
    np.testing.assert_allclose(found.log_probs.detach().numpy(), np.where(mask, log_probs, 0), atol=1e-5)
    np.testing.assert_allclose(batch["old_log_probs"].numpy(), np.where(mask, log_probs, 0), atol=1e-5)
    np.testing.assert_allclose(found.entropy.detach().numpy(), np.where(mask, entropy, 0), atol=1e-5)
    values = policy.critic(batch["observation.state"]).squeeze(-1).detach().numpy()  # type: ignore[misc]
    np.testing.assert_allclose(found.values.detach().numpy(), np.where(mask, values, 0), atol=1e-5)
    assert (policy.log_probs(batch) == found.log_probs).all()


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_actions_are_drawn_with_their_probability_from_the_numbers_given(spec: DataSpec) -> None:
    policy = build(spec)
    state = {"observation.state": torch.tensor([[0.5, -1.0, 2.0]]).expand(20_000, 3)}
    uniforms = torch.rand(20_000, policy.draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = policy.sample(state, uniforms)
    assert (policy.sample(state, uniforms).actions == drawn.actions).all()
    out = policy.actor(state["observation.state"][:1])[0].detach()
    if spec is CONTINUOUS:
        np.testing.assert_allclose(drawn.actions.mean(0).numpy(), out.numpy(), atol=0.05)
        np.testing.assert_allclose(drawn.actions.std(0).numpy(), policy.log_std.detach().exp().numpy(), rtol=0.03)
    else:
        shares = torch.bincount(drawn.actions, minlength=3) / 20_000
        np.testing.assert_allclose(shares.numpy(), out.softmax(-1).numpy(), atol=0.02)
    extremes = torch.tensor([[2**-53], [1 - 2**-53]], dtype=torch.float64)
    edges = policy.sample({"observation.state": torch.zeros(2, 3)}, extremes)
    if spec is DISCRETE:
        assert edges.actions.tolist() == [0, 2]
    assert edges.log_probs.isfinite().all()


def test_steps_that_do_not_count_have_no_gradient_and_an_empty_batch_reaches_all_parameters() -> None:
    policy = build(CONTINUOUS)
    batch = episodes(policy)
    batch.values["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    found = policy.log_probs(batch, with_values=True, with_entropy=True)
    (found.log_probs.sum() + found.values.sum() + found.entropy.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in policy.parameters())


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
def test_evaluation_takes_the_likeliest_action_and_cloning_raises_its_probability(spec: DataSpec) -> None:
    policy = build(spec, value_head=False)
    state = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))
    out = policy.actor(state).detach()
    chosen = policy.select_action({"observation.state": state})
    assert torch.equal(chosen, out if spec is CONTINUOUS else out.argmax(-1))
    target = torch.zeros(16, 2) if spec is CONTINUOUS else torch.ones(16, dtype=torch.long)
    batch = {"observation.state": state, "action": target}
    optimizer = torch.optim.Adam(policy.parameters(), 0.05)
    first = float(policy(batch)["loss"].detach())
    for _ in range(30):
        optimizer.zero_grad()
        policy(batch)["loss"].backward()
        optimizer.step()
    assert float(policy(batch)["loss"].detach()) < first - 0.5
    assert policy.value({"observation.state": state}) is None


def test_a_saved_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = build(CONTINUOUS, std=0.3)
    policy.save_pretrained(tmp_path)
    back = PolicyModule.from_pretrained(tmp_path)
    assert isinstance(back, ActorCritic) and POLICY_REGISTRY.key_of(ActorCritic) == "actor_critic"
    state, uniforms = {"observation.state": torch.ones(2, 3)}, torch.full((2, 2), 0.3)
    assert torch.equal(policy.sample(state, uniforms).actions, back.sample(state, uniforms).actions)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads states"):
        build(DataSpec({**CONTINUOUS.features, "observation.images.top": Feature((3, 8, 8), "uint8", "image")}))
    with pytest.raises(ConfigError, match="activation"):
        ActorCritic(activation="step")
    with pytest.raises(ConfigError, match="std must be positive"):
        ActorCritic(std=0.0)
