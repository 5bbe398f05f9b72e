"""`import_lerobot`: a policy that LeRobot saved, as one of ours, normalisation included."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from etude.deploy.lerobot.features import Exchanged, read_features
from etude.deploy.lerobot.layout import from_lerobot
from etude.deploy.lerobot.processors import FeatureScale, Processors
from etude.deploy.lerobot.settings import check_crop, read_params
from etude.errors import CheckpointError, DataError, one_line
from etude.policies.base import PolicyModule
from etude.runs.tensor_file import read_tensor_file
from etude.types import DataSpec, Feature

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
TRAINED = "pretrained_model"
"""Folder of a policy inside a checkpoint of LeRobot's training."""


def import_lerobot(source: str | Path) -> PolicyModule:
    """Return the policy in a directory that LeRobot 0.4.4 saved, in eval mode.

    Args:
        source: A directory with config.json, model.safetensors and both processors: what `save_pretrained` writes, a
            checkpoint of LeRobot's training, or a repository in the hub's cache (`models--owner--name`, or its name).
    """
    directory = find_saved(Path(source))
    where = str(directory / CONFIG_FILE)
    config = _read_config(directory / CONFIG_FILE)
    processors = Processors(directory)
    try:
        features = read_features(config, processors.renamed, where)
        kind, params = read_params(config, any(one.role == "image" for one in features), where)
        scales = {one.ours: processors.scale(one) for one in features}
        policy = _build(kind, params, features, scales)
        tensors = read_tensor_file(directory / WEIGHTS_FILE)
    except (OSError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{directory} cannot be imported: {one_line(error, 300)}") from None
    except DataError as error:
        raise CheckpointError(f"{directory} cannot be imported: {error}") from None
    cameras = [one.ours for one in features if one.role == "image"]
    try:
        weights = from_lerobot(policy, cameras, {name: value.float() for name, value in tensors.items()})
    except CheckpointError as error:
        raise CheckpointError(f"{directory / WEIGHTS_FILE}: {error}") from None
    policy.load_state_dict({**weights, **_normalizer_state(policy, scales)})
    return policy.eval()


def find_saved(source: Path) -> Path:
    """Return the directory with config.json: this one, that inside a checkpoint, or that of a cached repository."""
    if not source.exists() and len(source.parts) == 2:
        source = _hub_cache() / f"models--{source.parts[0]}--{source.parts[1]}"
    for place in (source, source / TRAINED):
        if (place / CONFIG_FILE).is_file():
            return place
    snapshots = source / "snapshots"
    if snapshots.is_dir():
        main = source / "refs" / "main"
        names = [main.read_text().strip()] if main.is_file() else sorted(path.name for path in snapshots.iterdir())
        if len(names) == 1 and (snapshots / Path(names[0]).name / CONFIG_FILE).is_file():
            return snapshots / Path(names[0]).name
        raise CheckpointError(f"{source} holds {len(names)} versions and no main one; name a folder of {snapshots}")
    what = f"it has no {CONFIG_FILE}" if source.is_dir() else "there is no such directory; nothing is downloaded here"
    raise CheckpointError(f"{source} is no policy that LeRobot saved: {what}")


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no configuration of a policy")
    if str(config.get("format", "")).startswith("etude"):
        raise CheckpointError(f"{path} is one of Etude's own policies, which needs no import")
    return config


def _build(
    kind: type[PolicyModule], params: dict[str, Any], features: list[Exchanged], scales: dict[str, FeatureScale]
) -> PolicyModule:
    """Make the policy with its layers, whose weights are still to be loaded."""
    normalization = {name: scale.mode for name, scale in scales.items()}
    policy = kind(**params, normalization=normalization)
    cameras = [one for one in features if one.role == "image"]
    if cameras and params.get("image_crop"):
        check_crop(params["image_crop"], params["image_size"] or list(cameras[0].shape[1:]))
    policy.is_restored = True
    policy.build(DataSpec({one.ours: _feature(one, scales[one.ours]) for one in features}))
    return policy


def _feature(one: Exchanged, scale: FeatureScale) -> Feature:
    dtype = "uint8" if one.role == "image" else "float32"
    return Feature(one.shape, dtype, one.role, stats=scale.statistics or None)


def _normalizer_state(policy: PolicyModule, scales: dict[str, FeatureScale]) -> dict[str, Any]:
    state = {f"normalizer.{name}": value for name, value in policy.normalizer.state_dict().items()}
    for name, scale in scales.items():
        if scale.center is not None and scale.width is not None:
            key = name.replace(".", "__")
            state[f"normalizer.{key}__center"], state[f"normalizer.{key}__width"] = scale.center, scale.width
    return state
