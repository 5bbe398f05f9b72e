"""What is left of a trained policy of components: it acts on what it was trained on, is exported, and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.cli.train import resume_run, train_config
from etude.config.build import build
from etude.config.load import Loaded, load
from etude.config.restore import load_policy
from etude.errors import CheckpointError, ConfigError, DataError
from etude.policies import ComponentPolicy
from tests.unit.deploy.serving import serving

h5py = pytest.importorskip("h5py")
CAMERA = "observation.images.head"
EXPERIMENT = """\
seed: 0
model:
  component_config_paths: {info_embedder: info_embedder.yaml, action_decoder: action_decoder.yaml}
  component_optims:
    info_embedder: {type: adamw, params: {lr: 1e-3}}
    action_decoder: {type: adamw, params: {lr: 1e-3}}
data:
  datamodule:
    type: episodic_dataset_factory
    params:
      dataset_dir_l: demos
      task_config: {observations: {observation.state: state, observation.images.head: head}, actions: action}
      chunk_size: 4
      robot_obs_size: 3
      img_obs_size: 1
      normalization: min_max
  batch_size: 4
train:
  trainer: naive_flow_matching_policy_trainer
  save_dir: run
  save_every: 1
  epoch: 1
policy: {params: {n_action_steps: 1, actor: {params: {n_steps: 1}}}}
loggers: []
"""
EMBEDDER = """\
schema_version: 1
model:
  graph:
    inputs: {state: {shape: [B, 3, 2]}, head: {shape: [B, 3, 8, 8]}}
    modules: {layers: {_type_: Linear, in_features: 198, out_features: 4}}
    nodes:
      - {name: numbers, call: op:flatten, args: [$state, 1]}
      - {name: pixels, call: op:flatten, args: [$head, 1]}
      - {name: all, call: op:cat, args: [[$numbers, $pixels], 1]}
      - {name: condition, call: module:layers, args: [$all]}
    outputs: [$condition]
"""
DECODER = """\
schema_version: 1
model:
  graph:
    inputs: {noisy: {shape: [B, 4, 2]}, time: {shape: [B]}, condition: {shape: [B, 4]}}
    modules: {layers: {_type_: Linear, in_features: 13, out_features: 8}}
    nodes:
      - {name: flat, call: op:flatten, args: [$noisy, 1]}
      - {name: step, call: op:unsqueeze, args: [$time, 1]}
      - {name: all, call: op:cat, args: [[$flat, $step, $condition], 1]}
      - {name: found, call: module:layers, args: [$all]}
      - {name: velocity, call: op:reshape, args: [$found, [-1, 4, 2]]}
    outputs: [$velocity]
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two episodes, two models and an experiment."""
    (tmp_path / "demos").mkdir()
    draw = np.random.default_rng(0)
    for number in range(2):
        with h5py.File(tmp_path / "demos" / f"{number}.hdf5", "w") as file:
            file["state"] = draw.normal(size=(6, 2)).astype(np.float32)
            file["action"] = draw.normal(size=(6, 2)).astype(np.float32)
            file["head"] = draw.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    for name, text in {"x": EXPERIMENT, "info_embedder": EMBEDDER, "action_decoder": DECODER}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*overrides: str) -> Loaded:
    return load("x.yaml", overrides)


def fit(*overrides: str) -> Any:
    trainer = build(read(*overrides))
    trainer.show_progress = False
    trainer.fit()
    return trainer


def glance(rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """What a robot sees at one instant."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (rows, 3, 8, 8), generator=generator).to(torch.uint8)
    return {"observation.state": torch.randn(rows, 2, generator=generator), CAMERA: pixels}


# -- histories ---------------------------------------------------------------------------------------------------------


def test_a_policy_acts_on_the_histories_it_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.algorithms.components.naive import NaiveFlowMatching

    seen: list[dict[str, Tensor]] = []
    observe = NaiveFlowMatching.observe.__func__  # type: ignore[attr-defined]

    def look(cls: Any, models: Any, batch: Any) -> Any:
        seen.append({name: value for name, value in batch.items() if name in (CAMERA, "observation.state")})
        return observe(cls, models, batch)

    monkeypatch.setattr(NaiveFlowMatching, "observe", classmethod(look))
    fit()
    trained_on = {name: value.shape[1:] for name, value in seen[-1].items()}
    assert trained_on == {"observation.state": (3, 2), CAMERA: (3, 8, 8)}
    policy: Any = load_policy("run")
    moments = [glance(seed=seed) for seed in range(4)]
    for moment in moments:
        assert policy.select_action(moment).shape == (1, 2)
    assert {name: value.shape[1:] for name, value in seen[-1].items()} == trained_on
    normal = policy.statistics.normalize(
        {"observation.state": moments[3]["observation.state"], CAMERA: moments[3][CAMERA]}
    )
    torch.testing.assert_close(seen[-1]["observation.state"][:, -1], normal["observation.state"])
    torch.testing.assert_close(seen[-1][CAMERA], normal[CAMERA])
    oldest = policy.statistics.normalize({"observation.state": moments[1]["observation.state"]})
    torch.testing.assert_close(seen[-1]["observation.state"][:, 0], oldest["observation.state"])


@pytest.mark.slow
def test_such_a_policy_is_exported_and_served_alike(tmp_path: Path, child_env: dict[str, str]) -> None:
    pytest.importorskip("websockets")
    from etude.cli.export import export_source
    from etude.deploy import PolicyClient, load_exported

    fit()
    export_source("run", tmp_path / "out", kind="torch", which="auto")
    chunks = []
    policies: list[Any] = [load_policy("run"), load_exported(tmp_path / "out")]
    for policy in policies:
        torch.manual_seed(0)
        chunks.append(torch.cat([policy.select_action(glance(seed=seed)) for seed in range(3)]))
    torch.testing.assert_close(*chunks)
    moments = [{name: value[0].numpy() for name, value in glance(seed=seed).items()} for seed in range(3)]
    with serving(Path("run").absolute(), child_env) as (url, _), PolicyClient(url) as robot:
        served = np.stack([robot.act(moment) for moment in moments])
    assert served.shape == (3, 2)
    assert np.isfinite(served).all()


@pytest.mark.parametrize("name, frames", [("n_obs_steps", 2), ("image_obs_steps", 3)])
def test_a_policy_told_to_see_something_else_is_refused_before_training(name: str, frames: int) -> None:
    told = {"n_obs_steps": 3, "image_obs_steps": 1}[name]
    with pytest.raises(DataError, match=rf"the policy sees {frames} frames .* set the policy's {name} to {told}"):
        fit(f"policy.params.{name}={frames}")
    with pytest.raises(ConfigError, match="image_obs_steps must be at least 1"):
        ComponentPolicy({"info_embedder": EMBEDDER}, image_obs_steps=0)


# -- weights from elsewhere --------------------------------------------------------------------------------------------


def weights_of(run: str) -> dict[str, Tensor]:
    return load_policy(run, "last").state_dict()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_without_the_folder_it_took_weights_from(project: Path) -> None:
    fit("train.save_dir=first")
    taken = ["train.load_dir=first/epoch_1"]
    fit(*taken, "train.save_dir=whole", "train.epoch=3")
    fit(*taken, "train.save_dir=parts", "train.epoch=1")
    fit(*taken, "train.save_dir=again", "train.epoch=1")
    shutil.rmtree(project / "first")
    resume_run("parts", ["training.duration=3 epochs"])
    assert equal(weights_of("parts"), weights_of("whole"))
    train_config(Path("x.yaml"), [*taken, "train.save_dir=again", "train.epoch=3"], "auto")
    assert equal(weights_of("again"), weights_of("whole"))


def test_a_run_that_begins_needs_that_folder(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.load_dir: there is no .*/first"):
        read("train.load_dir=first")
    fit()
    with pytest.raises(CheckpointError, match=r"there is no directory .*first, and no checkpoint"):
        train_config(Path("x.yaml"), ["train.load_dir=first"], "never")


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_lies_beside_the_file_or_in_the_working_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    params = load(project / "x.yaml").config.data.params
    assert params["dataset_dir_l"] == str(project / "demos")
    shutil.copytree(project / "demos", elsewhere / "demos")
    shutil.rmtree(project / "demos")
    assert load(project / "x.yaml").config.data.params["dataset_dir_l"] == str(elsewhere / "demos")
    unlocated = load(project / "x.yaml", ["data.datamodule.params.dataset_dir_l=[later]"]).config.data.params
    assert unlocated["dataset_dir_l"] == ["later"]
