"""Actions that are said from what is observed: learned, taken back, saved and exported with the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.deploy.export import export_policy
from etude.deploy.lerobot.features import describe_features
from etude.errors import ConfigError, DataError
from etude.policies import ACT, MLP, ActorCritic, Diffusion, FlowMatching, PolicyModule, SoftActorCritic
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, stats

STATE = "observation.state"
RELATIVE: dict[str, Any] = {"action": {"scale": 50.0, "relative_to": ["finger_x", "finger_y"]}}


def named_spec() -> DataSpec:
    features = {
        STATE: Feature((3,), "float32", "state", names=("angle", "finger_x", "finger_y"), stats=stats(3)),
        "action": Feature((2,), "float32", "action", stats=stats(2)),
    }
    return DataSpec(features, fps=10.0)


def built(policy: PolicyModule, spec: DataSpec | None = None) -> PolicyModule:
    torch.manual_seed(0)
    policy.build(spec or named_spec())
    return policy.eval()


def test_actions_are_said_from_the_place_that_was_seen_last() -> None:
    policy = built(MLP(chunk_size=6, n_obs_steps=3, normalization=RELATIVE))
    batch = make_batch(named_spec(), history=3)
    normal = policy.normalizer.normalize(batch)["action"]
    finger = batch[STATE][:, -1, 1:]
    torch.testing.assert_close(normal, (batch["action"] - finger.unsqueeze(1)) / 50.0)
    torch.testing.assert_close(policy.normalizer.unnormalize_action(normal, batch), batch["action"])


def test_a_policy_that_says_nothing_stays_where_it_is() -> None:
    policy = built(MLP(chunk_size=2, hidden=[8], normalization=RELATIVE))
    torch.nn.init.zeros_(policy.net[-1].weight), torch.nn.init.zeros_(policy.net[-1].bias)
    seen = {STATE: torch.tensor([[0.1, 200.0, 300.0], [0.2, 7.0, 9.0]])}
    assert policy.predict_action_chunk(seen).tolist() == [[[200.0, 300.0]] * 2, [[7.0, 9.0]] * 2]
    assert policy.select_action(seen).tolist() == [[200.0, 300.0], [7.0, 9.0]]


@pytest.mark.parametrize(
    "kind, params",
    [
        (MLP, {"chunk_size": 6, "hidden": [16]}),
        (ACT, {"chunk_size": 6, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1,
               "n_vae_encoder_layers": 1}),
        (Diffusion, {"horizon": 8, "n_obs_steps": 1, "n_action_steps": 3, "head": "mlp", "hidden_dim": 16,
                     "num_inference_steps": 2, "clip_sample": False, "sampler": "ddim"}),
        (FlowMatching, {"horizon": 8, "n_obs_steps": 1, "n_action_steps": 3, "head": "mlp", "hidden_dim": 16,
                        "num_inference_steps": 2}),
    ],
)  # fmt: skip
def test_every_policy_learns_acts_loads_and_is_exported_with_them(
    kind: Any, params: dict[str, Any], tmp_path: Path
) -> None:
    derived = {"turned": {"numbers": "angle", "scale": 1.0}}
    policy = built(kind(**params, normalization=RELATIVE, derived=derived, observed=["turned"]))
    batch = make_batch(named_spec(), chunk=len(policy.action_delta_indices))
    policy.train()
    policy(batch)["loss"].backward()
    policy.eval().save_pretrained(tmp_path / "saved")
    loaded = kind.from_pretrained(tmp_path / "saved")
    here, there = batch[STATE], batch[STATE] + torch.tensor([0.0, 100.0, -50.0])  # the layers see the angle alone
    acted = []
    for one, seen in ((policy, here), (loaded, here), (loaded, there)):
        torch.manual_seed(1)
        acted.append(one.predict_action_chunk({STATE: seen}))
    assert torch.equal(acted[0], acted[1])
    torch.testing.assert_close(acted[2], acted[1] + torch.tensor([100.0, -50.0]))
    assert export_policy(policy, tmp_path / "exported").difference < 1e-3  # pixels


def test_a_batch_without_the_place_is_named() -> None:
    policy = built(MLP(normalization=RELATIVE))
    with pytest.raises(DataError, match=r"relative to numbers of observation\.state, which the batch does not have"):
        policy.normalizer.normalize({"action": torch.zeros(1, 2)})


@pytest.mark.parametrize(
    "normalization, message",
    [
        ({"action": {"scale": 1.0, "relative_to": "fingr_x"}}, "no number of the data"),
        ({"action": {"scale": 1.0, "relative_to": "finger_x"}}, "names 1 numbers, the action has shape"),
        ({"action": {"relative_to": ["finger_x", "finger_y"]}}, "say {scale: NUMBER"),
        ({"state": {"scale": 1.0, "relative_to": "finger_?"}}, "which is for actions; derive a difference"),
    ],
)
def test_what_makes_no_sense_is_refused_before_training(normalization: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(MLP(normalization=normalization))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [ActorCritic, SoftActorCritic])
def test_policies_that_rate_actions_alone_refuse_them(kind: Any) -> None:
    with pytest.raises(ConfigError, match="leave relative_to out"):
        built(kind(normalization=RELATIVE))


def test_lerobot_has_no_word_for_them() -> None:
    params: dict[str, Any] = {"chunk_size": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16}
    with pytest.raises(ConfigError, match="relative to what it sees"):
        describe_features(built(ACT(**params, n_encoder_layers=1, n_vae_encoder_layers=1, normalization=RELATIVE)))
