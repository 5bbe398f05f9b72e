"""Policies go to LeRobot 0.4.4 and come from it, and act there as they do here.

What LeRobot itself made and did is recorded in tests/fixtures/lerobot; where ETUDE_LEROBOT_PYTHON names a Python that
has it, LeRobot loads what is written here, and makes what is read here anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from etude.cli.main import app
from etude.config.restore import load_policy
from etude.deploy import export_lerobot, import_lerobot
from etude.errors import CheckpointError, ConfigError
from etude.policies import ACT, MLP, Diffusion, PolicyModule
from etude.types import DataSpec, Feature
from tests.fixtures.lerobot.weights import make_weights

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lerobot"
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
SMALL_ACT = {
    "chunk_size": 6, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1, "latent_dim": 4,
}  # fmt: skip
SMALL_UNET = {"horizon": 8, "n_obs_steps": 2, "n_action_steps": 3, "down_dims": [16, 32], "step_embed_dim": 16}
TOLERANCE = 1e-5
PYTHON = os.environ.get("ETUDE_LEROBOT_PYTHON")
needs_lerobot = pytest.mark.skipif(PYTHON is None, reason="ETUDE_LEROBOT_PYTHON names no Python that has lerobot")


def marked(case: str) -> Any:
    """Cameras and many noise levels take seconds, a large backbone more."""
    config = (FIXTURES / case / "config.json").read_text()
    if "resnet50" in config:
        return pytest.param(case, marks=pytest.mark.nightly)
    return pytest.param(case, marks=pytest.mark.slow) if "observation.images" in config or "horizon" in config else case


def stats(size: int, *, still: bool = False) -> dict[str, Any]:
    std = torch.linspace(0.3, 2.0, size)
    if still:
        std[-1] = 0
    mean = torch.linspace(-1.0, 3.0, size)
    found = {
        "mean": mean,
        "std": std,
        "min": mean - 2 * std,
        "max": mean + 3 * std,
        "q01": mean - std,
        "q99": mean + std,
    }
    return {key: value.tolist() for key, value in found.items()}


def make_spec(*, cameras: tuple[str, ...] = (), environment: bool = True, state: str = "observation.state") -> DataSpec:
    features = {
        state: Feature((5,), "float32", "state", stats=stats(5, still=True)),
        "action": Feature((4,), "float32", "action", stats=stats(4, still=True)),
    }
    if environment:
        features["observation.environment_state"] = Feature((3,), "float32", "environment", stats=stats(3))
    for name in cameras:
        features[f"observation.images.{name}"] = Feature((3, 36, 36), "uint8", "image")
    return DataSpec(features, fps=10.0)


def built(policy: PolicyModule, spec: DataSpec) -> PolicyModule:
    torch.manual_seed(0)
    policy.build(spec)
    for name, value in policy.named_buffers():  # as if BatchNorm had learned something
        if "running_var" in name:
            value.uniform_(0.5, 1.5)
    return policy.eval()


def blind() -> dict[str, PolicyModule]:
    """Policies that LeRobot can express."""
    ranges = {"state": "min_max", "environment": "quantiles", "action": "min_max"}
    plain = ACT(**SMALL_ACT, use_vae=False, pre_norm=True, activation="gelu", n_decoder_layers=2, normalization=ranges)
    few = Diffusion(
        **SMALL_UNET, sampler="ddim", num_inference_steps=5, prediction_type="sample", like_diffusers=True,
        film_scale=False,
    )  # fmt: skip
    return {
        "vae": built(ACT(**SMALL_ACT), make_spec()),
        "no vae, pre-norm, ranges": built(plain, make_spec()),
        "another name": built(ACT(**SMALL_ACT), make_spec(state="observation.joints")),
        "as it is": built(
            ACT(**SMALL_ACT, normalization=dict.fromkeys(("state", "environment", "action"), "identity")), make_spec()
        ),
        "ddpm, 100 steps": built(Diffusion(**SMALL_UNET), make_spec()),
        "ddim": built(few, make_spec()),
    }


def seeing() -> dict[str, PolicyModule]:
    """Policies with cameras that LeRobot can express."""
    top, both = make_spec(cameras=("top",), environment=False), make_spec(cameras=("top", "left"), environment=False)
    ensemble = ACT(**{**SMALL_ACT, "n_action_steps": 1}, temporal_ensemble_coeff=0.01, image_norm="batch")
    small = {**SMALL_UNET, "keypoints": 4, "image_dim": 8, "num_train_timesteps": 20}
    resized = Diffusion(**small, image_size=[48, 48], image_crop=[43, 43], image_norm="frozen")
    return {
        "cameras": built(ACT(**SMALL_ACT, image_norm="frozen"), both),
        "ensemble, batch norm": built(ensemble, top),
        "diffusion, cameras": built(Diffusion(**small, image_crop=[34, 32]), both),
        "diffusion, resized": built(resized, top),
    }


def see(policy: PolicyModule, steps: int = 6, rows: int = 2) -> dict[str, torch.Tensor]:
    """What a few robots see, step by step; what never moved in the data does."""
    generator, seen = torch.Generator().manual_seed(3), {}
    for step in range(steps):
        for name, feature in policy.spec.features.items():
            if feature.role == "image":
                pixels = torch.randint(256, (rows, *feature.shape), generator=generator)
                seen[f"{step}/{name}"] = pixels.to(torch.uint8)
            elif feature.role != "action":
                seen[f"{step}/{name}"] = 2 * torch.randn(rows, *feature.shape, generator=generator)
    return seen


def act(policy: PolicyModule, seen: dict[str, torch.Tensor]) -> torch.Tensor:
    """What our policy does with that."""
    torch.manual_seed(0)
    policy.reset()
    shown: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in seen.items():
        step, _, key = name.partition("/")
        shown.setdefault(step, {})[key] = value
    return torch.stack([policy.select_action(shown[step]) for step in sorted(shown)])


def theirs(case: str, folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Put what LeRobot made of a case into a folder; return what it saw and did."""
    shutil.copytree(FIXTURES / case, folder, dirs_exist_ok=True)
    if not (folder / "model.safetensors").exists():
        save_file(make_weights(json.loads((folder / "layout.json").read_text())), folder / "model.safetensors")
    return recorded(folder)


def recorded(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors = load_file(folder / "recorded.safetensors")
    seen = {name.removeprefix("seen/"): value for name, value in tensors.items() if name.startswith("seen/")}
    return seen, tensors["actions"]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far actions lie apart, relative to the largest or 1."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1.0))


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return distance(one, other) <= TOLERANCE


# ---- with what LeRobot made ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_what_lerobot_made_acts_here_as_there(case: str, tmp_path: Path) -> None:
    seen, done = theirs(case, tmp_path)
    policy = import_lerobot(tmp_path)
    assert near(act(policy, seen), done)
    export_lerobot(policy, tmp_path / "back")
    layout = json.loads((tmp_path / "layout.json").read_text())
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: list(value.shape) for name, value in written.items()} == layout
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", tmp_path))
    assert set(config) == set(before)
    # Said fully; cameras by name; what is dropped from training; a ratio that comes to the same pixels.
    other = {"normalization_mapping", "input_features", "drop_n_last_frames", "crop_ratio"}
    assert {key: value for key, value in config.items() if before[key] != value and key not in other} == {}


def test_chunks_are_lerobots_too(tmp_path: Path) -> None:
    seen, _ = theirs("act-vae", tmp_path)
    first = {name.removeprefix("0/"): value for name, value in seen.items() if name.startswith("0/")}
    chunk = load_file(tmp_path / "recorded.safetensors")["chunk"]
    assert near(import_lerobot(tmp_path).predict_action_chunk(first), chunk)


def test_the_command_line_imports_a_checkpoint_of_lerobots_training(tmp_path: Path) -> None:
    seen, done = theirs("act-vae", tmp_path / "last" / "pretrained_model")
    target = tmp_path / "policy"
    result = CliRunner().invoke(app, ["import", str(tmp_path / "last"), "--output", str(target)])
    assert result.exit_code == 0, result.output
    assert "ACT with" in result.output
    policy: Any = load_policy(target)
    assert near(act(policy, seen), done)
    assert near(act(ACT.from_pretrained(target), seen), done)
    again = CliRunner().invoke(app, ["export", str(target), "--format", "lerobot", "--output", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert "actions differ by at most" in again.output
    assert "make_pre_post_processors" in (tmp_path / "again" / "README.md").read_text()


def test_a_repository_in_the_hubs_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--act"
    seen, done = theirs("act-vae", folder / "snapshots" / "abc")
    (folder / "snapshots" / "older").mkdir()
    with pytest.raises(CheckpointError, match="2 versions and no main one"):
        import_lerobot(folder)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert near(act(import_lerobot(folder), seen), done)
    assert near(act(import_lerobot("me/act"), seen), done)


# ---- without LeRobot -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_written_is_read_back_as_the_same_policy(tmp_path: Path) -> None:
    for name, policy in blind().items():
        done = export_lerobot(policy, tmp_path / name)
        seen = see(policy)
        assert done.difference <= TOLERANCE, name
        assert near(act(policy, seen), act(import_lerobot(tmp_path / name), seen)), name


CANNOT = {
    "camera, or": (ACT(**SMALL_ACT), make_spec(environment=False)),
    "n_obs_steps: 2": (ACT(**SMALL_ACT, n_obs_steps=2), make_spec()),
    "latency_steps": (ACT(**SMALL_ACT, latency_steps=1), make_spec()),
    "n_action_steps: 1 alone": (ACT(**SMALL_ACT, temporal_ensemble_coeff=0.1), make_spec()),
    "image_norm 'group'": (ACT(**SMALL_ACT, image_backbone="resnet18"), make_spec(cameras=("top",))),
    "image_backbone 'resnet10_small'": (
        ACT(**SMALL_ACT, image_backbone="resnet10_small", image_norm="frozen"), make_spec(cameras=("top",))
    ),
    "image_crop": (
        ACT(**SMALL_ACT, image_backbone="resnet10_small", image_norm="frozen", image_crop=[32, 32]),
        make_spec(cameras=("top",)),
    ),
    "image_size": (
        ACT(**SMALL_ACT, image_backbone="resnet10_small", image_norm="frozen", image_size=[32, 32]),
        make_spec(cameras=("top",)),
    ),
    "head 'transformer'": (Diffusion(horizon=16, head="transformer", n_layers=1, hidden_dim=16), make_spec()),
    "v_prediction": (Diffusion(**SMALL_UNET, prediction_type="v_prediction"), make_spec()),
    "noise_scale: 0.5 cannot be .*; set noise_scale: 1": (
        Diffusion(**SMALL_UNET, sampler="ddim", noise_scale=0.5), make_spec()
    ),
    "n_groups: 4": (Diffusion(**SMALL_UNET, n_groups=4), make_spec()),
    "multiple of 4": (Diffusion(**{**SMALL_UNET, "horizon": 6}), make_spec()),
    "num_inference_steps: 5 of 100": (Diffusion(**SMALL_UNET, num_inference_steps=5), make_spec()),
    "clipped samples": (Diffusion(**SMALL_UNET, sampler="ddim"), make_spec()),
    "image_dim: 8": (
        Diffusion(**SMALL_UNET, image_backbone="resnet10_small", keypoints=4), make_spec(cameras=("top",))
    ),
    "a MLP has no counterpart": (MLP(hidden=[8]), make_spec()),
}  # fmt: skip


@pytest.mark.parametrize("sentence", CANNOT)
def test_what_lerobot_cannot_express_is_refused_by_its_option(sentence: str, tmp_path: Path) -> None:
    policy, spec = CANNOT[sentence]
    if not policy.is_built:
        policy.build(spec)
    with pytest.raises(ConfigError, match=sentence):
        export_lerobot(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.slow
def test_a_trained_policy_of_less_noise_is_written_once_its_saved_config_says_all_of_it(tmp_path: Path) -> None:
    policy = built(Diffusion(**SMALL_UNET, sampler="ddim", like_diffusers=True, noise_scale=0.5), make_spec())
    policy.save_pretrained(tmp_path / "own")
    edit(tmp_path / "own" / CONFIG, lambda config: config["params"].update(noise_scale=1))
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "own"), "--format", "lerobot", "--output", str(tmp_path / "theirs")]
    )
    assert done.exit_code == 0, done.output
    assert load_policy(tmp_path / "own").options.noise_scale == 1
    assert import_lerobot(tmp_path / "theirs").options.noise_scale == 1


CONFIG, BEFORE = "config.json", "policy_preprocessor.json"
BROKEN = {
    "a policy 'pi0'": (CONFIG, lambda config: config.update(type="pi0")),
    "the field 'mystery'": (CONFIG, lambda config: config.update(mystery=1)),
    "of the type 'LANGUAGE'": (
        CONFIG, lambda config: config["input_features"].update(text={"type": "LANGUAGE", "shape": [3]})
    ),
    "the state is called observation.joints": (
        CONFIG, lambda config: config["input_features"].update({"observation.joints": {"type": "STATE", "shape": [5]}})
    ),
    "adapters": (CONFIG, lambda config: config.update(use_peft=True)),
    "'glu' is unknown": (CONFIG, lambda config: config.update(feedforward_activation="glu")),
    "replace_final_stride_with_dilation": (
        CONFIG, lambda config: config.update(replace_final_stride_with_dilation=True)
    ),
    "config.json asks for": (CONFIG, lambda config: config.update(n_encoder_layers=3)),
    "does not speak of": (CONFIG, lambda config: config.update(n_encoder_layers=1)),
    "where config.json makes it": (CONFIG, lambda config: config.update(dim_feedforward=25)),
    "the step 'tokenizer_processor'": (
        BEFORE, lambda pipeline: pipeline["steps"].append({"registry_name": "tokenizer_processor", "config": {}})
    ),
    "0 steps 'normalizer_processor'": (BEFORE, lambda pipeline: pipeline["steps"].pop()),
    "normalised by QUANTILE10": (
        BEFORE, lambda pipeline: pipeline["steps"][3]["config"]["norm_map"].update(STATE="QUANTILE10")
    ),
    "have no q01": (BEFORE, lambda pipeline: pipeline["steps"][3]["config"]["norm_map"].update(STATE="QUANTILES")),
    "cannot read the statistics": (BEFORE, lambda pipeline: pipeline["steps"][3].update(state_file="../none")),
    "is no pipeline": (BEFORE, lambda pipeline: pipeline.pop("steps")),
    "cannot be imported": (CONFIG, lambda config: config.update(dim_model="wide")),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BROKEN)
def test_what_cannot_be_imported_is_refused_in_one_sentence(sentence: str, tmp_path: Path) -> None:
    theirs("act-vae", tmp_path)
    file, change = BROKEN[sentence]
    edit(tmp_path / file, change)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        import_lerobot(tmp_path)
    assert "\n" not in str(refused.value)


def test_what_is_no_policy_of_lerobots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing is downloaded"):
        import_lerobot(tmp_path / "lerobot" / "act")
    theirs("act-vae", tmp_path / "old")
    (tmp_path / "old" / BEFORE).unlink()
    with pytest.raises(CheckpointError, match="before 0"):
        import_lerobot(tmp_path / "old")
    with pytest.raises(CheckpointError, match="etude import"):
        load_policy(tmp_path / "old")
    policy = built(ACT(**SMALL_ACT), make_spec())
    policy.save_pretrained(tmp_path / "own")
    with pytest.raises(CheckpointError, match="needs no import"):
        import_lerobot(tmp_path / "own")


# ---- with LeRobot ----------------------------------------------------------------------------------------------------


def run_lerobot(*arguments: str | Path) -> None:
    assert PYTHON is not None
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [PYTHON, str(FIXTURES / "theirs.py"), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_lerobot
@pytest.mark.nightly
@pytest.mark.timeout(330)
def test_lerobot_loads_what_is_written_and_does_the_same(tmp_path: Path) -> None:
    made = {**blind(), **seeing()}
    for name, policy in made.items():
        export_lerobot(policy, tmp_path / name)
        save_file(see(policy), tmp_path / name / "seen.safetensors")
    run_lerobot("act", *(tmp_path / name for name in made))
    differences = {}
    for name, policy in made.items():
        actions = load_file(tmp_path / name / "done.safetensors")["actions"]
        differences[name] = distance(act(policy, see(policy)), actions)
    assert max(differences.values()) <= TOLERANCE, differences


@needs_lerobot
@pytest.mark.nightly
@pytest.mark.timeout(330)
def test_what_lerobot_makes_now_is_imported(tmp_path: Path) -> None:
    run_lerobot("make", tmp_path)
    for case in CASES:
        seen, done = recorded(tmp_path / case)
        assert near(act(import_lerobot(tmp_path / case), seen), done), case
