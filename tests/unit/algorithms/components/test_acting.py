"""The policies that come with Etude act, are described and exported like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config.presets import presets
from etude.policies import ComponentPolicy, PolicyModule
from etude.policies.graph import build_model
from etude.types import DataSpec, Feature

ACTORS = {
    "naive_flow_matching_policy": "naive_flow_matching_policy_trainer",
    "vfp_single_expert": "vfp_single_expert_trainer",
    "variational_flow_matching_policy": "variational_flow_matching_policy_trainer",
    "cfg_vqvae_flow_matching": "cfg_vqvae_flow_matching_trainer",
}
FOLDERS = [*ACTORS, "mutual_information_estimator"]


def folder_of(name: str) -> Path:
    return presets()["digits"].parent / "components" / name


def built(name: str, **params: Any) -> ComponentPolicy:
    configs = {path.stem: str(path) for path in sorted(folder_of(name).glob("*.yaml"))}
    policy = ComponentPolicy(
        configs, actor={"type": ACTORS[name], "params": {"n_steps": 1, **params}}, horizon=12, n_action_steps=8, seed=0
    )
    features = {}
    for key, role, width in (("observation.state", "state", 39), ("action", "action", 4)):
        stats = {"mean": torch.ones(width).numpy(), "std": 2 * torch.ones(width).numpy()}
        features[key] = Feature((width,), role=role, stats=stats)  # type: ignore[arg-type]
    policy.build(DataSpec(features))
    return policy


@pytest.mark.parametrize("path", [path for name in FOLDERS for path in sorted(folder_of(name).glob("*.yaml"))],
                         ids=lambda path: f"{path.parent.name}/{path.stem}")  # fmt: skip
def test_every_model_file_builds_and_its_shapes_fit(path: Path) -> None:
    model = build_model(path)
    assert model.shapes
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


@pytest.mark.parametrize("name", ACTORS)
def test_a_policy_acts_in_the_units_of_the_data_and_is_loaded_again(name: str, tmp_path: Path) -> None:
    policy = built(name)
    seen = {"observation.state": torch.randn(2, 39)}
    torch.manual_seed(0)
    chunk = policy.predict_action_chunk(seen)
    assert chunk.shape == (2, 12, 4)
    assert policy.select_action(seen).shape == (2, 4)
    policy.save_pretrained(tmp_path)
    loaded = PolicyModule.from_pretrained(tmp_path)
    torch.manual_seed(0)
    assert torch.equal(loaded.predict_action_chunk(seen), chunk)


@pytest.mark.nightly  # a graph takes 3 to 10 s to be made
@pytest.mark.parametrize("name", ACTORS)
def test_an_exported_policy_acts_alike(name: str, tmp_path: Path) -> None:
    pytest.importorskip("msgpack")
    from etude.deploy import export_policy

    params = {"guidance": 2.0} if name == "cfg_vqvae_flow_matching" else {}
    assert export_policy(built(name, **params), tmp_path).difference < 1e-5
