"""Features derived inside the policy: what numpy computes, in training, on the robot, saved and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError
from etude.policies import ACT, MLP, Diffusion, PolicyModule
from etude.policies.normalize import Normalizer
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, now, stats

NAMES = ("hand_x", "hand_y", "hand_z", "gripper", "object_x", "object_y", "object_z")
GAP = {"difference": ["object_?", "hand_?"], "scale": 0.1}
DERIVED: dict[str, Any] = {
    "gap": GAP,
    "far": {"distance": [["object_x", "object_y"], ["hand_x", "hand_y"]], "scale": 2.0, "center": 1.0},
    "opening": {"numbers": "gripper", "scale": [0.5], "center": [0.7]},
}
STATE = "observation.state"


def named_spec() -> DataSpec:
    features = {
        STATE: Feature((7,), "float32", "state", names=NAMES, stats=stats(7)),
        "observation.goal": Feature((3,), "float32", "environment", stats=stats(3)),
        "action": Feature((3,), "float32", "action", stats=stats(3)),
    }
    return DataSpec(features, fps=10.0)


def built(policy: PolicyModule) -> PolicyModule:
    torch.manual_seed(0)
    policy.build(named_spec())
    return policy.eval()


def test_derived_features_are_what_numpy_computes() -> None:
    policy = built(MLP(chunk_size=6, derived=DERIVED))
    batch = make_batch(named_spec())
    state = batch[STATE].numpy()
    found = policy.normalizer.normalize(batch)
    gap = (state[:, 4:7] - state[:, 0:3]) / 0.1
    np.testing.assert_allclose(found["gap"].numpy(), gap.clip(-10, 10), rtol=1e-6)
    far = (np.linalg.norm(state[:, 4:6] - state[:, 0:2], axis=1, keepdims=True) - 1) / 2
    np.testing.assert_allclose(found["far"].numpy(), far, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["opening"].numpy(), (state[:, 3:4] - 0.7) / 0.5, rtol=1e-6, atol=1e-6)
    plain = Normalizer(named_spec()).normalize(batch)
    assert torch.equal(found[STATE], plain[STATE])  # the data's own are as they were


def test_velocity_is_the_change_since_the_observation_before() -> None:
    policy = built(MLP(chunk_size=6, n_obs_steps=3, derived={"speed": {"velocity": "hand_?", "scale": 0.5}}))
    batch = make_batch(named_spec(), history=3)
    hand = batch[STATE].numpy()[..., :3]
    expected = np.concatenate([np.zeros((4, 1, 3)), np.diff(hand, axis=1)], axis=1) / 0.5
    np.testing.assert_allclose(policy.normalizer.normalize(batch)["speed"].numpy(), expected, rtol=1e-5, atol=1e-6)
    policy(batch)


@pytest.mark.parametrize(
    "kind, params",
    [
        (MLP, {"chunk_size": 6, "hidden": [16]}),
        (ACT, {"chunk_size": 6, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1,
               "n_vae_encoder_layers": 1}),
        (Diffusion, {"horizon": 8, "n_obs_steps": 1, "n_action_steps": 3, "down_dims": [16], "num_inference_steps": 2}),
    ],
)  # fmt: skip
def test_every_policy_learns_acts_and_loads_with_them(kind: Any, params: dict[str, Any], tmp_path: Path) -> None:
    policy = built(kind(**params, derived=DERIVED, observed=["gap", "far"]))
    batch = make_batch(named_spec(), chunk=len(policy.action_delta_indices))
    policy.train()
    policy(batch)["loss"].backward()
    policy.eval().save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    seen = {STATE: batch[STATE]}  # the goal is not looked at, so it need not come
    torch.manual_seed(1)
    acted = policy.select_action(seen)
    torch.manual_seed(1)
    assert torch.equal(loaded.select_action(seen), acted)


def test_what_is_not_observed_changes_no_action() -> None:
    policy = built(MLP(chunk_size=2, derived={"gap": GAP}, observed=["gap"]))
    seen = now(make_batch(named_spec()))
    moved = {**seen, STATE: seen[STATE] + torch.tensor([0.25, -0.5, 1.0, 9.0, 0.25, -0.5, 1.0])}
    torch.testing.assert_close(policy.predict_action_chunk(moved), policy.predict_action_chunk(seen), rtol=0, atol=1e-4)
    assert policy.normalizer.modes.keys() == {"action"}


def test_physical_scales_need_no_statistics() -> None:
    spec = DataSpec({STATE: Feature((3,), "float32", "state"), "action": Feature((2,), "float32", "action")})
    scales = {"state": {"scale": [0.1, 0.2, 1.0], "center": 0.5}, "action": {"scale": 2.0}}
    normalizer = Normalizer(spec, scales)
    value = torch.tensor([[0.6, 0.5, 1.5]])
    torch.testing.assert_close(normalizer.normalize({STATE: value})[STATE], torch.tensor([[1.0, 0.0, 1.0]]))
    assert torch.equal(normalizer.unnormalize_action(torch.ones(1, 2)), torch.full((1, 2), 2.0))


@pytest.mark.parametrize(
    "recipe, message",
    [
        ({"difference": ["objct_?", "hand_?"], "scale": 1}, "names 'objct_?', which is no number of the data"),
        ({"difference": ["object_x", "hand_?"], "scale": 1}, "compares 1 and 3 numbers"),
        ({"difference": "object_?", "scale": 1}, "difference takes two groups of numbers"),
        ({"numbers": "gripper"}, "has no scale"),
        ({"numbers": "gripper", "scale": 0}, "must be finite and above 0"),
        ({"numbers": "gripper", "scale": float("nan")}, "must be finite and above 0"),
        ({"numbers": "gripper", "scale": [1, 2]}, "has 2 numbers, the feature has 1"),
        ({"numbers": "gripper", "scale": "wide"}, "takes a number"),
        ({"numbers": "gripper", "scale": 1, "center": float("inf")}, "must be finite"),
        ({"numbers": "gripper", "velocity": "gripper", "scale": 1}, "exactly one of numbers, difference"),
        ({"scale": 1}, "it says none"),
        ({"velocity": "hand_?", "scale": 1}, "set n_obs_steps to 2 or more"),
        ({"numbers": 3, "scale": 1}, "takes names of numbers"),
        ({"nmbers": "gripper", "scale": 1}, "and not 'nmbers'; did you mean 'numbers'?"),
        ("gripper", "say how it is computed"),
    ],
)
def test_what_cannot_be_derived_is_refused_before_training(recipe: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="'mine'") as caught:
        built(MLP(derived={"mine": recipe}))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_mistakes_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"observed is empty: layers have to see something \(there are "):
        built(MLP(observed=[]))
    with pytest.raises(ConfigError, match=r"observed names 'gpa', which is no feature .*did you mean 'gap'"):
        built(MLP(derived={"gap": GAP}, observed=["gpa"]))
    with pytest.raises(ConfigError, match="has the name of a feature of the data"):
        built(MLP(derived={STATE: GAP}))
    with pytest.raises(ConfigError, match=r"say \{scale: NUMBER, center: NUMBER\}"):
        built(MLP(normalization={"state": {"scl": 1}}))
    with pytest.raises(ConfigError, match=r"of the normalization of observation\.state has 2 numbers"):
        built(MLP(normalization={STATE: {"scale": [1, 2]}}))


def test_numbers_without_names_are_said_by_place() -> None:
    policy = built(MLP(derived={"goal": {"numbers": ["observation.goal.2", "observation.goal.0"], "scale": 1.0}}))
    batch = make_batch(named_spec())
    found = policy.normalizer.normalize(batch)["goal"]
    assert torch.equal(found, batch["observation.goal"][:, [2, 0]])
