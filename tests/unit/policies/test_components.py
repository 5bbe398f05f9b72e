"""Policies made of components: weights, freezing, loading, acting and saving."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude import TrainingConfiguration
from etude.config.restore import load_policy
from etude.config.training import OptimizerConfiguration
from etude.data.statistics import NormStats
from etude.errors import CheckpointError, ConfigError, RegistryError
from etude.policies import ComponentPolicy, PolicyModule
from etude.policies.initialize import initialize_weights
from etude.registry import TRAINER_REGISTRY
from etude.trainer import wrap_train_step
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, make_spec

MODEL = """\
schema_version: 1
wide: {width}
model:
  sequential:
    inputs: [x]
    layers:
      - {{_type_: Linear, _args_: [{inputs}, "${{wide}}"]}}
      - {{_type_: Linear, _args_: ["${{wide}}", {outputs}]}}
"""


class Regression:
    """Predict a chunk of two actions from the state; the encoder is another component."""

    def __init__(self, models: Any, optimizers: Any, loss: Any, device: Any) -> None:
        self.models, self.optimizers = models, optimizers

    def train_step(self, data: dict[str, Tensor]) -> dict[str, Any]:
        assert isinstance(self.models, nn.ModuleDict)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        found = self.sample_actions(self.models, data)
        loss = (found - data["action"]).square().mean()
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return {"total": loss}

    @staticmethod
    def sample_actions(models: Any, batch: dict[str, Tensor], gain: float = 1.0) -> Tensor:
        hidden = models["encoder"](batch["observation.state"])
        return gain * models["decoder"](hidden).reshape(-1, 2, 3)


class Noisy(Regression):
    @staticmethod
    def sample_actions(models: Any, batch: dict[str, Tensor], noise: Tensor | None = None) -> Tensor:
        found = Regression.sample_actions(models, batch)
        return found + (torch.randn_like(found) if noise is None else noise)


class Mute:
    """Trains only."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def trainers() -> Iterator[None]:
    entries = dict(TRAINER_REGISTRY._entries)
    for name, kind in {"regression": Regression, "noisy": Noisy, "mute": Mute}.items():
        TRAINER_REGISTRY.add(name, kind)
    yield
    TRAINER_REGISTRY._entries = entries


def files(folder: Path) -> dict[str, str]:
    for name, (inputs, width, outputs) in {"encoder": (5, 4, 4), "decoder": (4, 4, 6)}.items():
        (folder / f"{name}.yaml").write_text(MODEL.format(inputs=inputs, width=width, outputs=outputs))
    return {name: str(folder / f"{name}.yaml") for name in ("encoder", "decoder")}


def make(folder: Path, kind: str = "regression", **params: Any) -> ComponentPolicy:
    given: dict[str, Any] = {"seed": 0, "actor": {"type": kind}, "horizon": 2, **params}
    return ComponentPolicy(files(folder), **given)


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def train(policy: Any, data: Any, run: Any = False, **settings: Any) -> Any:
    optimizers = {name: OptimizerConfiguration(match=[name], lr=0.01) for name in ("encoder", "decoder")}
    config = {"training_steps": 3, "batch_size": 4, "optimizers": optimizers, "log_every": 1, **settings}
    trainer = wrap_train_step(Regression, {})(
        policy, data, config=TrainingConfiguration(**config), run=run, loggers=[], show_progress=False
    )
    trainer.fit()
    return trainer


def rows(count: int = 12) -> dict[str, Tensor]:
    spec = make_spec(5, 3)
    return make_batch(spec, count, chunk=2)


# -- weights ---------------------------------------------------------------------------------------------------------


def test_the_seed_decides_the_weights_whatever_was_drawn_before(tmp_path: Path) -> None:
    one = make(tmp_path)
    before = torch.get_rng_state()
    torch.manual_seed(99)
    other = make(tmp_path, seed=0)
    torch.set_rng_state(before)
    assert same(one, other)
    assert not same(one, make(tmp_path, seed=1))
    assert torch.equal(before, torch.get_rng_state())


def test_a_component_is_the_same_whatever_stands_beside_it(tmp_path: Path) -> None:
    alone = ComponentPolicy({"decoder": files(tmp_path)["decoder"]}, seed=0)
    assert same(alone["decoder"], make(tmp_path)["decoder"])


def test_init_draws_every_layer_that_has_weights_anew() -> None:
    layers = [
        nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3), nn.ConvTranspose3d(2, 3, 3), nn.Linear(4, 5), nn.Embedding(6, 4),
        nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3, vdim=3, add_bias_kv=True), nn.LayerNorm(4),
        nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.GRU(3, 4), nn.Bilinear(2, 3, 4),
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)
    initialize_weights(model)
    assert not [name for name, tensor in model.state_dict().items() if (tensor == 7).any()]
    assert torch.equal(model[7].weight, torch.ones(4))
    bound = (6 / (2 * 9 + 3 * 9)) ** 0.5
    assert model[1].weight.abs().max() <= bound
    assert not model[3].bias.any()
    assert not model[5].in_proj_bias.any()


def test_init_is_asked_for_by_component(tmp_path: Path) -> None:
    plain, drawn = make(tmp_path), make(tmp_path, build={"decoder": {"init": True}})
    assert same(plain["encoder"], drawn["encoder"])
    assert not any(value.any() for name, value in drawn["decoder"].state_dict().items() if name.endswith("bias"))


def test_frozen_components_stay_as_they_are_and_in_eval_mode(tmp_path: Path) -> None:
    policy = make(tmp_path, build={"encoder": {"freeze": True}})
    before = copy.deepcopy(policy)
    seen: list[bool] = []
    policy["encoder"].register_forward_hook(lambda module, *_: seen.append(module.training))
    for model in policy.values():
        model.train()  # as trainers do at the start of a step
    optimizers = {"decoder": OptimizerConfiguration(match=["decoder"], lr=0.01)}
    train(policy, rows(), optimizers=optimizers)
    assert seen == [False] * 3
    assert policy["decoder"].training
    assert same(before["encoder"], policy["encoder"])
    assert not same(before["decoder"], policy["decoder"])
    copied = copy.deepcopy(policy).train()
    assert not copied["encoder"].training
    assert all(not parameter.requires_grad for parameter in policy["encoder"].parameters())


def test_a_component_without_optimizer_is_not_updated_and_said_once(tmp_path: Path, caplog: Any) -> None:
    policy = make(tmp_path)
    before = copy.deepcopy(policy)
    with caplog.at_level(logging.WARNING, "etude"):
        train(policy, rows(), optimizers={"decoder": OptimizerConfiguration(match=["decoder"], lr=0.01)})
    assert same(before["encoder"], policy["encoder"])
    assert not same(before["decoder"], policy["decoder"])
    assert [record.message for record in caplog.records if "encoder" in record.message] == [
        "encoder has neither an optimizer nor freeze: it is not updated"
    ]


@pytest.mark.parametrize(
    "params, words",
    [
        ({"build": {"head": {"init": True}}}, "there is no component 'head'; there are encoder, decoder"),
        ({"build": {"encoder": {"frozen": True}}}, "init and freeze are true or false, got frozen: True"),
        ({"build": {"encoder": {"init": "yes"}}}, "init and freeze are true or false, got init: 'yes'"),
        ({"actor": {"type": "regression", "params": {"gian": 1}}}, "unexpected keyword argument 'gian'"),
        ({"actor": {"type": "regression", "steps": 1}}, "actor is {type: key of a trainer"),
        ({"load_dir": "/nowhere/at/all"}, "there is no directory /nowhere/at/all"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, params: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        make(tmp_path, **params)
    assert words in str(caught.value)


def test_a_component_is_not_called_as_the_policy_has_something_else(tmp_path: Path) -> None:
    given = files(tmp_path)["encoder"]
    for name in ("spec", "describe", "keys", "a.b"):
        with pytest.raises(ConfigError, match="choose another name"):
            ComponentPolicy({name: given, "other": given})
    with pytest.raises(ConfigError, match="at least one"):
        ComponentPolicy({})
    with pytest.raises(RegistryError, match="unknown trainer 'regresion'"):
        ComponentPolicy({"encoder": given}, actor={"type": "regresion"})


def test_an_error_in_a_component_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("schema_version: 1\nmodel: {sequentail: {}}\n")
    with pytest.raises(ConfigError, match=r"bad.yaml:2:\d+: model.sequentail: unknown key"):
        ComponentPolicy({"head": tmp_path / "bad.yaml"})


# -- weights from elsewhere ------------------------------------------------------------------------------------------


def test_weights_come_from_the_files_of_each_component(tmp_path: Path, caplog: Any) -> None:
    trained = make(tmp_path, seed=5)
    source = tmp_path / "weights"
    source.mkdir()
    torch.save(
        {f"module.{name}": value for name, value in trained["encoder"].state_dict().items()}, source / "encoder.pt"
    )
    with caplog.at_level(logging.WARNING, "etude"):
        policy = make(tmp_path, load_dir=str(source), build={"encoder": {"init": True}, "decoder": {"init": True}})
    assert same(policy["encoder"], trained["encoder"])
    biases = [value for name, value in policy["decoder"].state_dict().items() if name.endswith("bias")]
    assert not any(bias.any() for bias in biases)  # what was not there is initialised
    assert caplog.messages == [f"{source} has no weights of decoder: it begins with those it was made with"]
    (source / "encoder.pt").unlink()
    with pytest.raises(CheckpointError, match="has no weights of encoder, decoder"):
        make(tmp_path, load_dir=str(source))


def test_a_pickle_with_more_than_weights_is_not_read(tmp_path: Path) -> None:
    torch.save({"model": Regression}, tmp_path / "encoder.pt")
    with pytest.raises(CheckpointError, match="cannot read the weights of encoder"):
        make(tmp_path, load_dir=str(tmp_path))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "encoder.pt")
    with pytest.raises(CheckpointError, match=r"the weights of encoder in .* do not fit"):
        make(tmp_path, load_dir=str(tmp_path))


# -- acting ----------------------------------------------------------------------------------------------------------


def test_it_acts_in_the_units_of_the_data(tmp_path: Path) -> None:
    policy = make(tmp_path, actor={"type": "regression", "params": {"gain": 2.0}})
    spec = make_spec(5, 3)
    policy.build(spec)
    batch = make_batch(spec, 4, chunk=2)
    statistics = NormStats({name: spec[name].stats for name in ("action", "observation.state")})
    normal = statistics.normalize(batch)
    expected = 2.0 * policy["decoder"](policy["encoder"](normal["observation.state"])).reshape(4, 2, 3)
    chunk = policy.predict_action_chunk(batch)
    torch.testing.assert_close(chunk, statistics.unnormalize("action", expected).detach())
    torch.testing.assert_close(policy.select_action({"observation.state": batch["observation.state"]}), chunk[:, 0])


def test_a_saved_policy_needs_no_file_and_no_data(tmp_path: Path) -> None:
    policy = make(tmp_path, build={"encoder": {"freeze": True}})
    policy.build(make_spec(5, 3))
    policy.use_statistics(NormStats({"action": {"mean": [1.0] * 3, "std": [2.0] * 3}}))
    policy.save_pretrained(tmp_path / "saved")
    for file in tmp_path.glob("*.yaml"):
        file.unlink()
    loaded: Any = PolicyModule.from_pretrained(tmp_path / "saved")
    batch = make_batch(make_spec(5, 3), 4, chunk=2)
    assert torch.equal(loaded.predict_action_chunk(batch), policy.predict_action_chunk(batch))
    assert loaded.frozen_components == ["encoder"]


def test_what_keeps_a_policy_from_acting_is_said(tmp_path: Path) -> None:
    batch = make_batch(make_spec(5, 3), 4, chunk=2)
    for params, words in [
        ({"actor": None}, "no trainer is named as its actor"),
        ({"kind": "mute"}, "'mute' has none"),
        ({"horizon": None}, "policy.params.horizon"),
    ]:
        policy = make(tmp_path, **params)  # type: ignore[arg-type]
        policy.build(make_spec(5, 3))
        with pytest.raises(ConfigError, match=words):
            policy.predict_action_chunk(batch)
    policy = make(tmp_path)
    policy.build(DataSpec({"observation.state": Feature((5,), role="state")}))
    with pytest.raises(ConfigError, match="has no features"):
        policy.predict_action_chunk(batch)
    policy = make(tmp_path, horizon=3)
    policy.build(make_spec(5, 3))
    with pytest.raises(ConfigError, match=r"gave \(4, 2, 3\), not \(batch, 3, 3\)"):
        policy.predict_action_chunk(batch)
    with pytest.raises(ConfigError, match="no loss of its own"):
        policy(batch)


def test_data_without_features_trains_and_is_restored(tmp_path: Path) -> None:
    trainer = train(make(tmp_path), rows(), tmp_path / "run")
    policy: Any = load_policy(tmp_path / "run")
    assert same(policy, trainer.policy)
    with pytest.raises(ConfigError, match="has no features"):
        policy.predict_action_chunk(rows())


def test_a_policy_trained_on_features_acts_from_its_checkpoint(tmp_path: Path) -> None:
    from etude.data import MapData
    from etude.data.columns import Columns

    batch = rows()
    data = MapData(Columns(batch), spec=make_spec(5, 3))
    trainer = train(make(tmp_path), data, tmp_path / "run")
    assert (tmp_path / "run" / "dataset_stats.json").is_file()
    restored: Any = load_policy(tmp_path / "run")
    assert torch.equal(restored.predict_action_chunk(batch), trainer.policy.predict_action_chunk(batch))


@pytest.mark.slow
def test_it_is_exported_with_its_noise_as_an_input(tmp_path: Path) -> None:
    from etude.deploy import load_exported
    from etude.deploy.export import export_policy

    spec = make_spec(5, 3)
    for kind in ("regression", "noisy"):
        policy = make(tmp_path, kind)
        policy.build(spec)
        done = export_policy(policy, tmp_path / kind)
        assert done.difference < 1e-5
    exported = load_exported(tmp_path / "noisy")
    assert exported.manifest["noise"] == [2, 3]


# -- files -----------------------------------------------------------------------------------------------------------


def test_every_component_and_its_optimizer_is_a_file_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = train(make(tmp_path), rows(), run, save_every="1 epochs", keep_last=None, training_steps=9)
    assert sorted(link.name for link in run.glob("epoch_*")) == ["epoch_1", "epoch_2", "epoch_3"]
    found = {file.name for file in (run / "epoch_3").iterdir()}
    assert found >= {"encoder.safetensors", "decoder.safetensors", "encoder_opt.safetensors", "decoder_opt.safetensors"}
    assert not {"policy.safetensors", "optimizer.safetensors"} & found
    for source in (run, run / "epoch_3"):
        assert same(load_policy(source), trainer.policy)
        assert same(make(tmp_path, seed=7, load_dir=str(source)), trainer.policy)
    plain = tmp_path / "plain"  # the file of a component holds what its state dictionary is called
    plain.mkdir()
    shutil.copy(run / "epoch_3" / "encoder.safetensors", plain)
    assert same(make(tmp_path, seed=7, load_dir=str(plain))["encoder"], trainer.policy["encoder"])


def test_links_to_checkpoints_that_are_not_kept_go_with_them(tmp_path: Path) -> None:
    train(make(tmp_path), rows(), tmp_path / "run", save_every="1 epochs", keep_last=1, training_steps=9)
    assert [link.name for link in (tmp_path / "run").glob("epoch_*")] == ["epoch_3"]


def test_a_component_may_be_called_like_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    given = files(tmp_path)
    names = {"encoder": "session", "decoder": "optimizer", "third": "policy"}
    policy = ComponentPolicy(
        {names["encoder"]: given["encoder"], names["decoder"]: given["decoder"], "policy": given["decoder"]}, seed=0
    )
    data = rows()

    class Renamed(Regression):
        @staticmethod
        def sample_actions(models: Any, batch: dict[str, Tensor], gain: float = 1.0) -> Tensor:
            hidden = models["session"](batch["observation.state"])
            return (models["optimizer"](hidden) + models["policy"](hidden)).reshape(-1, 2, 3)

    optimizers = {name: OptimizerConfiguration(match=[name], lr=0.01) for name in policy}
    config = TrainingConfiguration(training_steps=3, batch_size=4, optimizers=optimizers)
    wrap_train_step(Renamed, {})(
        policy, data, config=config, run=tmp_path / "run", loggers=[], show_progress=False
    ).fit()
    assert same(load_policy(tmp_path / "run"), policy)
