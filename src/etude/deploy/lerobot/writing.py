"""`export_lerobot`: a policy as a directory that LeRobot's `from_pretrained` loads, processors included."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.deploy.export import TOLERANCE, Exported
from etude.deploy.lerobot.features import describe_features
from etude.deploy.lerobot.layout import to_lerobot
from etude.deploy.lerobot.processors import make_processors, norm_map, require_normalized
from etude.deploy.lerobot.reading import CONFIG_FILE, WEIGHTS_FILE, import_lerobot
from etude.deploy.lerobot.settings import to_config
from etude.errors import CheckpointError, ConfigError
from etude.policies.act import ACT
from etude.policies.base import PolicyModule
from etude.policies.card import write_card
from etude.policies.diffusion import Diffusion
from etude.policies.pretrained import own_class
from etude.runs.durable import write_atomically

_USAGE = """from lerobot.policies.factory import get_policy_class, make_pre_post_processors

policy = get_policy_class("{kind}").from_pretrained(".")
preprocessor, postprocessor = make_pre_post_processors(policy.config, pretrained_path=".")
action = postprocessor(policy.select_action(preprocessor(observation)))"""


def export_lerobot(policy: nn.Module, directory: str | Path) -> Exported:
    """Write an ACT or Diffusion policy for LeRobot 0.4.4, read it back, and compare what both do.

    Args:
        policy: A built policy.
        directory: Where config.json, model.safetensors and the processors go.
    """
    if not isinstance(policy, PolicyModule) or own_class(policy) not in (ACT, Diffusion):
        raise ConfigError(f"LeRobot is given ACT and Diffusion, a {type(policy).__name__} has no counterpart there")
    policy.require_built()
    require_normalized(policy)
    config, contents = _make_files(policy)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in contents.items():
            (Path(folder) / name).write_bytes(content)
        difference = _compare(policy, import_lerobot(folder))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():  # config.json, without which nothing is loaded, is the last
        write_atomically(directory / name, content)
    write_card(policy, directory, _USAGE.format(kind=config["type"]))
    return Exported(directory / WEIGHTS_FILE, directory / CONFIG_FILE, difference)


def _make_files(policy: PolicyModule) -> tuple[dict[str, Any], dict[str, bytes]]:
    features = describe_features(policy)
    config = to_config(policy, features, norm_map(policy, features))
    weights = to_lerobot(policy, [one.ours for one in features if one.role == "image"])
    files = {WEIGHTS_FILE: weights, **make_processors(policy, features), CONFIG_FILE: config}
    return config, {name: _encoded(name, content) for name, content in files.items()}


def _encoded(name: str, content: dict[str, Any]) -> bytes:
    if name.endswith(".json"):
        return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
    from safetensors.torch import save as to_bytes

    encoded: bytes = to_bytes(content, {"format": "pt"})
    return encoded


def _compare(policy: PolicyModule, other: PolicyModule) -> float:
    """Return how far the chunks of what was read back lie from the policy's; refuse what is not the same policy."""
    policy, largest = copy.deepcopy(policy).cpu(), 0.0
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2, 3):
            observation = _example(policy, seed)
            chunks = []
            for one in (policy, other):
                torch.manual_seed(seed)
                chunks.append(one.predict_action_chunk(observation).double())
            difference = float((chunks[0] - chunks[1]).abs().max())
            largest = max(largest, difference)
            if not difference <= TOLERANCE * max(1.0, float(chunks[0].abs().max())):
                raise CheckpointError(
                    f"what was written for LeRobot acts differently from the policy: actions differ by {difference:.1e}"
                )
    return largest


def _example(policy: PolicyModule, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    steps = () if policy.observation_delta_indices is None else (len(policy.observation_delta_indices),)
    observation: dict[str, Tensor] = {}
    for name, feature in policy.spec.features.items():
        if not policy.looks_at(name, feature):
            continue
        shape = (1, *steps, *feature.shape)
        if feature.role == "image":
            observation[name] = torch.randint(256, shape, generator=generator).to(torch.uint8)
        else:
            observation[name] = policy.normalizer.unnormalize(name, torch.randn(shape, generator=generator))
    return observation
