"""The soft actor-critic and its residual form: actions within bounds, how likely they are, and many critics at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from etude import Trainer, TrainingConfiguration
from etude.errors import CheckpointError, ConfigError
from etude.policies import MLP, FlowMatching, PolicyModule, ResidualPolicy, SoftActorCritic
from etude.policies.critics import CriticEnsemble
from etude.registry import POLICY_REGISTRY
from etude.types import DataSpec, Feature

STATE = Feature((3,), "float32", "state")
BOUNDS = {"min": [-2.0, 0.0], "max": [2.0, 10.0]}
SPEC = DataSpec({"observation.state": STATE, "action": Feature((2,), "float32", "action", stats=BOUNDS)})
PLAIN = {"state": "identity", "action": "min_max"}


def build(kind: type[SoftActorCritic] = SoftActorCritic, spec: DataSpec = SPEC, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = kind(**{"hidden": [8, 8], "critics": 4, **options})
        policy.build(spec)
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return policy


def imitator() -> MLP:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        policy = MLP([8], chunk_size=3, normalization=PLAIN)
        policy.build(SPEC)
    return policy


def test_how_likely_an_action_is_is_what_torch_says() -> None:
    policy = build().double()
    seen = policy.see({"observation.state": torch.randn(50, 3, dtype=torch.float64)})
    noise = torch.randn(50, 2, dtype=torch.float64)
    drawn = policy.draw(seen, noise)
    mean, log_std = policy.actor(seen.features).chunk(2, -1)
    squash = torch.distributions.TanhTransform()
    known = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, log_std.exp()), [squash])
    torch.testing.assert_close(drawn.actions, torch.tanh(mean + log_std.exp() * noise))
    torch.testing.assert_close(drawn.log_probs, known.log_prob(drawn.actions).sum(-1), rtol=1e-6, atol=1e-6)
    far = policy.draw(seen, noise * 1e4)  # flat beyond what a number can tell from 1
    assert far.actions.abs().max() <= 1 and far.log_probs.isfinite().all()


def test_actions_lie_within_the_bounds_of_the_data_and_evaluation_takes_the_middle() -> None:
    policy = build(std=3.0)
    state = {"observation.state": torch.randn(500, 3)}
    uniforms = torch.rand(500, policy.draws, dtype=torch.float64)
    drawn = policy.sample(state, uniforms)
    assert torch.equal(policy.sample(state, uniforms).actions, drawn.actions)
    low, high = torch.tensor(BOUNDS["min"]), torch.tensor(BOUNDS["max"])
    assert (drawn.actions >= low).all() and (drawn.actions <= high).all()
    assert (drawn.actions - low < 0.2).any() and (high - drawn.actions < 0.2).any()
    middle = policy.actor(state["observation.state"])[:, :2].tanh()
    torch.testing.assert_close(policy.select_action(state), low + (middle.detach() + 1) / 2 * (high - low))
    torch.testing.assert_close(policy.normal_actions({"action": drawn.actions}).abs().max() <= 1, torch.tensor(True))
    unbounded = DataSpec({"observation.state": STATE, "action": Feature((2,), "float32", "action")})
    assert build(spec=unbounded).sample(state, uniforms).actions.abs().max() <= 1


@pytest.mark.parametrize("layer_norm", [True, False])
def test_critics_in_one_product_are_those_computed_one_by_one(layer_norm: bool) -> None:
    torch.manual_seed(3)
    critics = CriticEnsemble(5, [7, 6], 4, layer_norm).double()
    for parameter in critics.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    features, actions = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    found = critics(features, actions)
    for number in range(4):
        out = torch.cat([features, actions], 1)
        for layer in range(3):
            out = out @ critics.weights[layer][number] + critics.biases[layer][number]
            if layer < 2:
                if layer_norm:
                    gain, shift = critics.gains[layer][number, 0], critics.shifts[layer][number, 0]
                    out = nn.functional.layer_norm(out, out.shape[-1:], gain, shift)
                out = out.relu()
        torch.testing.assert_close(found[number], out[:, 0])
    asked = torch.tensor([3, 1])
    torch.testing.assert_close(critics(features, actions, subset_Z=asked), found[asked])
    weights = [critics.weights[0][number] for number in range(4)]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


def test_the_critics_of_targets_follow_by_their_share() -> None:
    policy = build()
    before = [value.clone() for value in policy.target_critics.parameters()]
    policy.follow(0.25)
    moved = list(policy.target_critics.parameters())
    for was, now, leader in zip(before, moved, policy.critics.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * was + 0.25 * leader)
        assert not now.requires_grad


def test_cloning_moves_the_middle_to_what_was_recorded() -> None:
    policy = build()
    state = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    batch = {"observation.state": state, "action": torch.tensor([[1.0, 7.0]]).expand(32, 2)}
    optimizer = torch.optim.Adam(policy.parameters(), 0.02)
    for _ in range(200):
        optimizer.zero_grad()
        policy(batch)["loss"].backward()
        optimizer.step()
    np.testing.assert_allclose(policy.select_action({"observation.state": state}).mean(0), [1.0, 7.0], atol=0.1)


def test_a_saved_policy_comes_back_as_it_was(tmp_path: Path) -> None:
    policy = build(temperature=0.3)
    policy.save_pretrained(tmp_path)
    back = PolicyModule.from_pretrained(tmp_path)
    assert isinstance(back, SoftActorCritic) and POLICY_REGISTRY.key_of(SoftActorCritic) == "soft_actor_critic"
    state, uniforms = {"observation.state": torch.ones(2, 3)}, torch.full((2, 2), 0.3)
    assert torch.equal(policy.sample(state, uniforms).actions, back.sample(state, uniforms).actions)
    assert torch.equal(policy.log_temperature, back.log_temperature)


# ---- residual --------------------------------------------------------------------------------------------------------


def test_a_correction_of_nothing_is_the_base_and_the_largest_is_the_scale(tmp_path: Path) -> None:
    imitator().save_pretrained(tmp_path)
    policy = build(ResidualPolicy, base=str(tmp_path), scale=0.2)
    state = {"observation.state": torch.randn(40, 3)}
    first = imitator().predict_action_chunk(state)[:, 0]
    widths = torch.tensor([2.0, 5.0])  # half of the range
    for parameter in policy.actor.parameters():
        parameter.data.zero_()
    low, high = torch.tensor(BOUNDS["min"]), torch.tensor(BOUNDS["max"])
    torch.testing.assert_close(policy.select_action(state), first.clamp(low, high))
    drawn = policy.sample(state, torch.rand(40, 2, dtype=torch.float64)).actions
    assert ((drawn - first.clamp(low, high)).abs() <= 0.2 * widths + 1e-5).all()
    assert (drawn >= low - 1e-6).all() and (drawn <= high + 1e-6).all()


def test_the_base_is_never_trained_and_is_saved_with_the_correction(tmp_path: Path) -> None:
    imitator().save_pretrained(tmp_path / "base")
    policy = build(ResidualPolicy, base=str(tmp_path / "base"))
    policy.train()
    assert not policy.base.training and not any(p.requires_grad for p in policy.base.parameters())
    policy.save_pretrained(tmp_path / "whole")
    for path in (tmp_path / "base").iterdir():
        path.unlink()
    back = PolicyModule.from_pretrained(tmp_path / "whole")
    state, uniforms = {"observation.state": torch.ones(2, 3)}, torch.full((2, 2), 0.3)
    assert isinstance(back, ResidualPolicy)
    assert torch.equal(policy.sample(state, uniforms).actions, back.sample(state, uniforms).actions)


def test_observations_are_normalised_as_by_the_base(tmp_path: Path) -> None:
    known = Feature((3,), "float32", "state", stats={"mean": [1.0, 2.0, 3.0], "std": [0.5, 2.0, 4.0]})
    base = MLP([8], normalization={"action": "min_max"})
    base.build(DataSpec({**SPEC.features, "observation.state": known}))
    base.save_pretrained(tmp_path / "base")
    policy = build(ResidualPolicy, base=str(tmp_path / "base"))  # of a simulator, which has no statistics
    seen = policy.see({"observation.state": torch.tensor([[1.5, 0.0, 3.0]])})
    torch.testing.assert_close(seen.features, torch.tensor([[1.0, -1.0, 0.0]]))
    policy.save_pretrained(tmp_path / "whole")
    ones = {"observation.state": torch.ones(1, 3)}
    again: Any = PolicyModule.from_pretrained(tmp_path / "whole")
    assert torch.equal(again.see(ones).features, policy.see(ones).features)
    plain = build(ResidualPolicy, base=str(tmp_path / "base"), normalization={"state": "identity"})
    assert torch.equal(plain.see(ones).features, torch.ones(1, 3))


@pytest.mark.slow
def test_a_run_can_be_corrected_and_the_correction_exported(tmp_path: Path) -> None:
    from etude.deploy import export_policy

    data = {"observation.state": torch.randn(64, 3), "action": torch.rand(64, 1, 2)}
    base = MLP([8], normalization={"state": "identity", "action": "identity"})
    config = TrainingConfiguration(training_steps=2, batch_size=8)
    base.build(SPEC)
    Trainer(base, data, config=config, run=tmp_path / "run", loggers=[], show_progress=False).fit()
    policy = build(ResidualPolicy, base=str(tmp_path / "run"))
    assert torch.equal(policy.base.net[0].weight, base.net[0].weight)
    for kind, made in (("residual", policy), ("plain", build())):
        assert export_policy(made, tmp_path / kind).difference < 1e-5


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_is_refused_in_one_sentence(tmp_path: Path) -> None:
    discrete = DataSpec({"observation.state": STATE, "action": Feature((), "int64", "action", classes=3)})
    pictures = DataSpec({**SPEC.features, "observation.images.top": Feature((3, 8, 8), "uint8", "image")})
    for kwargs, message in (
        ({"spec": discrete}, "takes continuous actions"),
        ({"spec": pictures}, "reads states"),
        ({"normalization": {"action": "mean_std"}}, "within -1 and 1"),
        ({"activation": "step"}, "activation"),
        ({"critics": 0}, "at least one critic"),
        ({"std": 0.0}, "must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(**kwargs)
    imitator().save_pretrained(tmp_path / "base")
    other = DataSpec({**SPEC.features, "observation.state": Feature((5,), "float32", "state")})
    noisy = FlowMatching(horizon=8, down_dims=[8], n_obs_steps=1, normalization={"state": "identity"})
    noisy.build(SPEC)
    noisy.save_pretrained(tmp_path / "noisy")
    for kwargs, error, message in (
        ({"base": str(tmp_path / "base"), "scale": 3.0}, ConfigError, "scale of ResidualPolicy"),
        ({"base": str(tmp_path / "base"), "spec": other}, ConfigError, r"trained with observation.state \[3\]"),
        ({"base": str(tmp_path / "noisy")}, ConfigError, "draws noise"),
        ({"base": str(tmp_path / "nowhere")}, CheckpointError, "no such directory"),
    ):
        with pytest.raises(error, match=message):
            build(ResidualPolicy, **kwargs)
