"""What every policy shares: building, acting, saving."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import etude.policies
from etude import Loss
from etude.errors import CheckpointError, ConfigError, DataError
from etude.policies.base import PolicyModule, masked_loss
from etude.policies.observation import to_batch
from etude.registry import POLICY_REGISTRY
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, make_spec, now

STATE = "observation.state"


class Linear(PolicyModule):
    """The least a policy needs: what a user writes."""

    def __init__(self, chunk_size: int = 4, clip: bool = False, **options: Any) -> None:
        super().__init__(chunk_size, **options)
        self.clip = clip

    @property
    def clips_actions(self) -> bool:
        return self.clip

    def make_layers(self, spec: DataSpec) -> None:
        self.layer = nn.Linear(spec[STATE].shape[0] * self.n_obs_steps, self.horizon * self.action_dim)
        self.dropout = nn.Dropout(0.5)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        out: Tensor = self.layer(self.dropout(batch[STATE].flatten(1)))
        return out.view(-1, self.horizon, self.action_dim)

    def forward(self, batch: Mapping[str, Any]) -> Loss:
        batch = self.normalizer.normalize(batch)
        actions, valid = self.targets(batch)
        return masked_loss((self.sample_actions(batch) - actions).square(), valid)


class Plain(Linear):
    """A policy without options of its own, so that its parameters are all plain."""

    def __init__(self, chunk_size: int = 4, n_obs_steps: int = 1, n_action_steps: int | None = None) -> None:
        super().__init__(chunk_size, n_obs_steps=n_obs_steps, n_action_steps=n_action_steps)


def built(**options: Any) -> Linear:
    torch.manual_seed(0)
    policy = Linear(**options)
    policy.build(make_spec())
    return policy


@pytest.fixture
def registered() -> Iterator[None]:
    POLICY_REGISTRY.add("plain-test", Plain)
    yield
    del POLICY_REGISTRY._entries["plain-test"]


# ---- building --------------------------------------------------------------------------------------------------------


def test_a_policy_is_made_without_shapes_and_says_so() -> None:
    policy = Linear()
    assert not policy.is_built and "not built" in repr(policy)
    for act in (policy.select_action, policy.predict_action_chunk):
        with pytest.raises(ConfigError, match="Linear has no layers yet"):
            act({STATE: torch.zeros(1, 5)})
    with pytest.raises(ConfigError, match="has no layers yet"):
        policy.save_pretrained("nowhere")
    with pytest.raises(ConfigError, match="is built already"):
        built().build(make_spec())


def test_windows_follow_from_chunk_and_history() -> None:
    assert Linear(3).action_delta_indices == [0, 1, 2]
    assert Linear(3).observation_delta_indices is None
    assert Linear(3, n_obs_steps=3).observation_delta_indices == [-2, -1, 0]
    with pytest.raises(ConfigError, match="at least one action"):
        Linear(0)


@pytest.mark.parametrize("names", [[], ["action", "action.gripper"]])
def test_a_policy_needs_exactly_one_action(names: list[str]) -> None:
    state = make_spec()[STATE]
    with pytest.raises(DataError, match="needs one action feature"):
        Linear().build(DataSpec({STATE: state, **{name: make_spec()["action"] for name in names}}))


@pytest.mark.parametrize(
    "mode, fits", [("min_max", True), ("quantiles", True), ("mean_std", False), ("identity", False)]
)
def test_a_policy_that_clips_needs_bounded_actions(mode: str, fits: bool) -> None:
    policy = Linear(clip=True, normalization={"action": mode})
    if fits:
        policy.build(make_spec())
    else:
        with pytest.raises(ConfigError, match=r"clips its samples to \[-1, 1\].*min_max"):
            policy.build(make_spec())
    built(normalization={"action": mode})


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_what_is_real_and_no_split_changes_it() -> None:
    errors = torch.rand(6, 5, 3, generator=torch.Generator().manual_seed(0))
    valid = (torch.arange(5) < torch.arange(6)[:, None]).float()
    penalty = torch.arange(6.0)
    whole = masked_loss(errors, valid, penalty)
    parts = [masked_loss(errors[s], valid[s], penalty[s]) for s in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(whole.total, sum(part.total for part in parts))
    assert float(whole.weight) == sum(float(part.weight) for part in parts) == valid.sum()
    steps = [(float(errors[b, h].mean()) + b) for b in range(6) for h in range(5) if valid[b, h]]
    assert float(whole.total / whole.weight) == pytest.approx(sum(steps) / len(steps))


def test_chunks_of_another_length_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"action comes as \(4, 6, 3\), but Linear wants \(batch, 4, 3\).*windows"):
        built()(make_batch(make_spec(), chunk=6))


# ---- acting ----------------------------------------------------------------------------------------------------------


def test_a_chunk_is_in_the_units_of_the_data_without_gradient_and_without_dropout() -> None:
    policy = built().train()
    observation = now(make_batch(make_spec()))
    chunk = policy.predict_action_chunk(observation)
    assert chunk.shape == (4, 4, 3) and not chunk.requires_grad
    assert policy.training, "the mode comes back as it was"
    policy.eval()
    raw = policy.sample_actions(policy.normalizer.normalize(observation))
    torch.testing.assert_close(chunk, policy.normalizer.unnormalize_action(raw))


def test_actions_are_selected_through_the_executor() -> None:
    policy = built(n_action_steps=2)
    frames = [now(make_batch(make_spec(), seed=seed)) for seed in range(3)]
    actions = [policy.select_action(frame) for frame in frames]
    assert torch.equal(actions[0], policy.predict_action_chunk(frames[0])[:, 0])
    assert torch.equal(actions[1], policy.predict_action_chunk(frames[0])[:, 1])
    assert torch.equal(actions[2], policy.predict_action_chunk(frames[2])[:, 0])


def test_reset_forgets_the_given_slots_only() -> None:
    policy = built()
    first, second = (now(make_batch(make_spec(), seed=seed)) for seed in range(2))
    policy.select_action(first)
    policy.reset([1, 3])
    action = policy.select_action(second)
    of_first, of_second = policy.predict_action_chunk(first), policy.predict_action_chunk(second)
    torch.testing.assert_close(action[[0, 2]], of_first[[0, 2], 1])
    torch.testing.assert_close(action[[1, 3]], of_second[[1, 3], 0])
    policy.reset()
    torch.testing.assert_close(policy.select_action(second), of_second[:, 0])


def test_history_is_gathered_while_acting() -> None:
    torch.manual_seed(0)
    policy = Linear(1, n_obs_steps=2)
    policy.build(make_spec())
    first, second = (now(make_batch(make_spec(), seed=seed)) for seed in range(2))
    window = {STATE: torch.stack([first[STATE], second[STATE]], dim=1)}
    policy.select_action(first)
    torch.testing.assert_close(policy.select_action(second), policy.predict_action_chunk(window)[:, 0])


def test_what_is_missing_from_an_observation_is_named() -> None:
    with pytest.raises(DataError, match=r"was built to see observation\.state, but the observation has only joints"):
        built().select_action({"joints": torch.zeros(1, 5)})


def test_the_observation_of_one_robot_becomes_a_batch() -> None:
    spec = make_spec(cameras=("top",), size=8)
    tensors = make_batch(spec, size=1)
    image = tensors["observation.images.top"][0].permute(1, 2, 0).numpy()
    batch = to_batch({STATE: tensors[STATE][0].numpy(), "observation.images.top": image, "other": 1}, spec)
    assert set(batch) == {STATE, "observation.images.top"}
    assert all(torch.equal(batch[name], tensors[name]) for name in batch)


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
def test_a_saved_policy_is_complete(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = Plain(6, n_action_steps=3)
    policy.build(make_spec())
    policy.set_execution(n_action_steps=2, temporal_ensemble_coeff=0.05, latency_steps=1)
    policy.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    for loader in (PolicyModule, Linear, Plain):
        loaded = loader.from_pretrained(tmp_path / "saved")
        assert type(loaded) is Plain and not loaded.training
        assert loaded.spec == policy.spec and loaded.describe() == policy.describe()
        assert loaded.executor.settings() == policy.executor.settings()
        assert loaded.state_dict().keys() == policy.state_dict().keys()
        assert all(torch.equal(value, policy.state_dict()[name]) for name, value in loaded.state_dict().items())
        frames = [now(make_batch(make_spec(), seed=seed)) for seed in range(5)]
        policy.reset()
        for frame in frames:
            assert torch.equal(loaded.select_action(frame), policy.select_action(frame))


def test_defaults_are_saved_too_so_that_they_may_change() -> None:
    policy = Plain()
    policy.build(make_spec())
    assert policy.describe()["params"] == {"chunk_size": 4, "n_obs_steps": 1, "n_action_steps": None}


def test_parameters_passed_on_to_the_base_are_saved_as_well(tmp_path: Path) -> None:
    policy = built(chunk_size=3, n_action_steps=2, normalization={"action": "min_max"})
    policy.save_pretrained(tmp_path)
    loaded = Linear.from_pretrained(tmp_path)
    assert loaded.normalizer.modes["action"] == "min_max"
    assert loaded.describe() == policy.describe()


def test_a_policy_can_be_made_from_its_description(tmp_path: Path) -> None:
    policy = etude.policies.MLP(hidden=[8], chunk_size=4)
    policy.build(make_spec())
    description = json.loads(json.dumps(policy.describe()))
    other = PolicyModule.from_description(description)
    other.load_state_dict(policy.state_dict())
    observation = now(make_batch(make_spec()))
    assert torch.equal(other.predict_action_chunk(observation), policy.predict_action_chunk(observation))


def test_a_policy_of_a_class_that_is_not_registered_is_loaded_by_that_class(tmp_path: Path) -> None:
    policy = Plain()
    policy.build(make_spec())
    policy.save_pretrained(tmp_path)
    assert type(Plain.from_pretrained(tmp_path)) is Plain
    with pytest.raises(CheckpointError, match=r"Plain, which is not registered; say which class that is: load_policy"):
        PolicyModule.from_pretrained(tmp_path)


def test_a_policy_that_takes_objects_cannot_be_saved(tmp_path: Path) -> None:
    policy = built(normalization={"action": "min_max"})
    policy._params["options"] = {"device": torch.device("cpu")}
    with pytest.raises(CheckpointError, match="cannot be saved: its constructor took a value that JSON cannot hold"):
        policy.save_pretrained(tmp_path)


def test_saving_again_replaces_the_old_files(tmp_path: Path) -> None:
    policy = Plain()
    policy.build(make_spec())
    policy.save_pretrained(tmp_path)
    with torch.no_grad():
        policy.layer.weight.zero_()
    policy.save_pretrained(tmp_path)
    assert not Plain.from_pretrained(tmp_path).layer.weight.any()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    policy = etude.policies.MLP(hidden=[8], chunk_size=2)
    policy.build(make_spec())
    policy.save_pretrained(directory)
    return directory


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


DAMAGE: dict[str, tuple[Any, str]] = {
    "no directory": (shutil.rmtree, "is not a saved policy: there is no such directory"),
    "no config": (lambda d: (d / "config.json").unlink(), "is not a saved policy: it has no config.json"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "cannot read the policy's weights"),
    "no JSON": (lambda d: (d / "config.json").write_bytes(b"\xff{"), "cannot read the saved policy"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "was not written by Etude"),
    "foreign": (lambda d: (d / "config.json").write_text('{"type": "act"}'), "was not written by Etude"),
    "newer": (lambda d: edit(d, schema_version=2), "has schema version 2, this Etude reads 1; upgrade Etude"),
    "a flipped bit": (lambda d: flip(d / "model.safetensors", -3), "its hash differs"),
    "cut short": (lambda d: (d / "model.safetensors").write_bytes(b"abc"), "its hash differs"),
    "unknown key": (lambda d: edit(d, policy="gone"), "unknown policy 'gone'"),
    "other sizes": (lambda d: edit(d, params={"hidden": [9], "chunk_size": 2}), "do not fit the policy in config.json"),
    "other parameters": (lambda d: edit(d, params={"hiden": [8]}), "does not describe a MLP"),
    "no spec": (lambda d: edit(d, spec=None), "does not describe a MLP"),
    "another executor": (lambda d: edit(d, executor={"n_action_steps": 9}), "does not describe a MLP"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_gives_one_clear_sentence(damage: str, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    spoil, message = DAMAGE[damage]
    spoil(directory)
    with pytest.raises(CheckpointError, match=message) as raised:
        PolicyModule.from_pretrained(directory)
    assert "\n" not in str(raised.value)


def test_a_policy_of_another_kind_is_refused_by_name(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds a policy 'mlp', no ACT; use PolicyModule\.from_pretrained"):
        etude.policies.ACT.from_pretrained(saved)


def test_policies_can_be_copied() -> None:
    policy = built(chunk_size=3)
    other = copy.deepcopy(policy)
    observation = now(make_batch(make_spec()))
    assert torch.equal(policy.select_action(observation), other.select_action(observation))
    assert other.describe() == policy.describe()


def test_the_package_offers_its_policies() -> None:
    assert etude.policies.ACTPolicy is etude.policies.ACT
    for name in etude.policies.__all__:
        assert getattr(etude.policies, name) is not None and name in dir(etude.policies)
    with pytest.raises(AttributeError, match="no attribute 'ACTT'"):
        etude.policies.ACTT  # noqa: B018


def test_one_task_tells_nothing_and_is_not_asked_for() -> None:
    policy = etude.policies.MLP(hidden=[8])
    spec = make_spec()
    policy.build(DataSpec({**spec.features, "task_index": Feature((), "int64", "task", classes=1)}))
    policy.select_action(now(make_batch(spec)))
