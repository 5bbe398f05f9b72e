"""Exported policies act as the module does, executor included, and their files can run nothing."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgpack")

from etude.cli.export import export_source
from etude.deploy import export_policy, load_exported
from etude.deploy.archive import CONFIGS, INPUTS, MODEL, read_archive
from etude.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from etude.policies import ACT, MLP, Diffusion, FlowMatching, PolicyModule
from tests.unit.deploy.serving import act_alone, built, make_spec, see, serving

SMALL_ACT = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
SMALL_UNET = {"horizon": 8, "n_obs_steps": 2, "n_action_steps": 3, "down_dims": [16]}
DERIVED = {
    "gap": {"difference": ["observation.state.[01]", "observation.state.[34]"], "scale": 0.5},
    "speed": {"velocity": "observation.state.?", "scale": 0.5},
}
pytestmark = pytest.mark.slow  # tracing takes seconds


def policies() -> dict[str, PolicyModule]:
    return {
        "queue": ACT(chunk_size=6, n_action_steps=4, **SMALL_ACT),
        "ensemble": ACT(chunk_size=6, temporal_ensemble_coeff=0.01, **SMALL_ACT),
        "history and latency": MLP(hidden=[16], chunk_size=5, n_obs_steps=2, latency_steps=1),
        "derived": MLP(hidden=[16], chunk_size=5, n_obs_steps=2, derived=DERIVED, observed=["gap", "speed"]),
        "flow": FlowMatching(num_inference_steps=3, **SMALL_UNET),
        "diffusion": Diffusion(num_inference_steps=3, sampler="ddim", **SMALL_UNET),
    }


@pytest.mark.parametrize("kind", ["torch", "onnx"])
@pytest.mark.parametrize("name", sorted(policies()))
def test_exported_actions_are_the_modules(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
    spec = make_spec(tasks=3)
    policy = built(policies()[name], spec)
    done = export_policy(policy, tmp_path, kind)
    assert done.difference < 1e-5
    exported = load_exported(tmp_path)
    for seed in (0, 1):
        episode = see(spec, 13, seed)
        np.testing.assert_allclose(act_alone(exported, episode), act_alone(policy, episode), rtol=0, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([done.file.name, "manifest.json", "README.md"])


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_cameras_are_exported(kind: str, tmp_path: Path) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    spec = make_spec(camera=32)
    policy = built(ACT(chunk_size=3, image_backbone="resnet10_small", **SMALL_ACT), spec)
    export_policy(policy, tmp_path, kind)
    exported, episode = load_exported(tmp_path), see(spec, 5)
    np.testing.assert_allclose(act_alone(exported, episode), act_alone(policy, episode), rtol=0, atol=1e-5)
    with pytest.raises(DataError, match="images of uint8"):
        exported.predict_action_chunk({name: torch.zeros(1, *s) for name, s, _ in exported._inputs})


@pytest.fixture
def exported_dir(tmp_path: Path) -> Path:
    export_policy(built(MLP(hidden=[8], chunk_size=4), make_spec()), tmp_path / "out")
    return tmp_path / "out"


def test_rows_are_independent_slots_and_execution_can_be_changed(tmp_path: Path) -> None:
    policy = built(MLP(hidden=[8], chunk_size=4), make_spec())
    export_policy(policy, tmp_path)
    exported = load_exported(tmp_path)
    for each in (policy, exported):
        each.set_execution(n_action_steps=1, temporal_ensemble_coeff=0.1)
    for step in range(6):
        if step == 3:
            policy.reset([1])
            exported.reset([1])
        seen = {"observation.state": torch.randn(3, 5)}
        torch.testing.assert_close(exported.select_action(seen), policy.select_action(seen), rtol=0, atol=1e-5)
    with pytest.raises(DataError, match=r"sees observation\.state"):
        exported.select_action({"observation.images.top": torch.zeros(1)})
    with pytest.raises(DataError, match="exported for"):
        exported.select_action({"observation.state": torch.zeros(4, 6)}, slots=[7, 8, 9, 10])


def test_the_manifest_tells_what_goes_in_and_comes_out(exported_dir: Path) -> None:
    manifest = json.loads((exported_dir / "manifest.json").read_text())
    assert manifest["inputs"] == [{"feature": "observation.state", "shape": [5], "dtype": "float32"}]
    assert manifest["output"] == {"shape": [4, 3]}
    assert manifest["executor"] == {"n_action_steps": 4, "temporal_ensemble_coeff": None, "latency_steps": 0}


def test_an_exported_policy_is_served_like_any_other(exported_dir: Path, child_env: dict[str, str]) -> None:
    from etude.deploy import PolicyClient

    pytest.importorskip("websockets")
    exported = load_exported(exported_dir)
    episode = see(exported.spec, 6)
    with serving(exported_dir, child_env) as (url, _), PolicyClient(url) as robot:
        assert robot.server["policy"] == "mlp"
        actions = np.stack([robot.act(seen) for seen in episode])
    np.testing.assert_allclose(actions, act_alone(exported, episode), rtol=0, atol=1e-6)


def test_noise_that_a_graph_cannot_repeat_is_refused(tmp_path: Path) -> None:
    policy = built(Diffusion(num_inference_steps=3, sampler="ddpm", **SMALL_UNET), make_spec())
    with pytest.raises(ConfigError, match="sampler: ddim"):
        export_policy(policy, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear cannot be exported"):
        export_policy(torch.nn.Linear(1, 1), tmp_path)
    with pytest.raises(ConfigError, match="one of torch, onnx"):
        export_policy(built(MLP(), make_spec()), tmp_path, "tflite")
    with pytest.raises(ConfigError, match="no layers yet"):
        export_policy(MLP(), tmp_path)


def test_onnx_without_its_packages_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"onnx.*pip install 'etude\[sim\]'"):
        export_policy(built(MLP(), make_spec()), tmp_path, "onnx")


def test_damage_is_noticed(exported_dir: Path, tmp_path: Path) -> None:
    file = exported_dir / "policy.pt2"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="hash differs"):
        load_exported(exported_dir)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_exported(exported_dir)
    with pytest.raises(CheckpointError, match="is no exported policy"):
        load_exported(tmp_path)
    (exported_dir / "manifest.json").write_text('{"format": "etude-export", "schema_version": 1}')
    with pytest.raises(CheckpointError, match="does not describe"):
        load_exported(exported_dir)


def _tampered(path: Path, changes: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as copy:
        root = archive.namelist()[0].partition("/")[0]
        for name in archive.namelist():
            inner = name.partition("/")[2]
            change = changes.get(inner)
            copy.writestr(name, change(archive.read(name)) if change else archive.read(name))
        for name, change in changes.items():
            if f"{root}/{name}" not in archive.namelist():
                copy.writestr(f"{root}/{name}", change(b""))
    return out.getvalue()


WEIGHTS = next(iter(CONFIGS))


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({INPUTS: lambda _: b"pickle"}, "pickled example inputs"),
        ({WEIGHTS: lambda old: old.replace(b'"use_pickle": false', b'"use_pickle": true', 1)}, "is pickled"),
        ({WEIGHTS: lambda old: old.replace(b'"weight_0"', b'"opaque_obj_0"', 1)}, "is pickled"),
        ({"data/weights/model.pt": lambda _: b"pickle"}, "it holds 'data/weights/model.pt'"),
        ({"data/aotinductor/model/x.so": lambda _: b"code"}, "it holds 'data/aotinductor"),
        ({MODEL: lambda old: old.replace(b'"guards_code": []', b'"guards_code": ["1"]')}, "not static"),
        ({MODEL: lambda old: old.replace(b'{"as_int": 1}', b'{"as_expr": {"expr_str": "x"}}', 1)}, "as_expr"),
        ({MODEL: lambda old: old.replace(b"builtins.tuple", b"subprocess.Popen", 1)}, "subprocess.Popen"),
    ],
)
def test_archives_that_could_run_code_are_not_read(exported_dir: Path, changes: Any, complaint: str) -> None:
    path = exported_dir / "policy.pt2"
    read_archive(path, _tampered(path, {}))
    with pytest.raises(CheckpointError, match=complaint):
        read_archive(path, _tampered(path, changes))


def test_a_format_that_there_is_not_is_named_with_all_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--format is torch, onnx, pretrained, components or lerobot, got 'tflite'"):
        export_source("nothing", tmp_path, kind="tflite", which="auto")


def test_nothing_but_our_own_code_writes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's writer ends the process where a disk is full.
    written: list[Any] = []
    save = torch.export.save
    monkeypatch.setattr(torch.export, "save", lambda program, to: (written.append(to), save(program, to)))
    export_policy(built(MLP(hidden=[4], chunk_size=2), make_spec(state=2, action=2)), tmp_path / "out")
    assert [type(one) for one in written] == [io.BytesIO]
