"""Write a policy as one graph with a manifest: normalisation inside, noise (where there is any) an input."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etude.deploy.archive import write_archive
from etude.deploy.exported import FORMAT, MANIFEST_FILE, SCHEMA_VERSION, ExportedPolicy, open_graph
from etude.errors import CheckpointError, ConfigError
from etude.extras import import_extra
from etude.policies.base import PolicyModule
from etude.policies.card import write_card
from etude.policies.pretrained import describe, weights_as_bytes
from etude.policies.spec import spec_to_json
from etude.runs.durable import remove, temp_name, write_atomically
from etude.types import Feature

FILES = {"torch": "policy.pt2", "onnx": "policy.onnx"}
TOLERANCE = 1e-5
"""How far an exported action may lie from the module's, relative to the largest action of the chunk or 1."""


@dataclass(frozen=True)
class Exported:
    """What an export left on disk."""

    file: Path
    manifest: Path
    difference: float
    """Largest difference from the module's actions over the chunks that were compared."""


class ChunkGraph(nn.Module):
    """A policy as a function of tensors: observations (and noise) in, a chunk in the data's units out.

    Args:
        policy: The policy, built.
        names: The features that come as inputs, in order.
    """

    def __init__(self, policy: PolicyModule, names: Sequence[str]) -> None:
        super().__init__()
        self.policy, self.names = policy, list(names)

    def forward(self, *values: Tensor) -> Tensor:
        """Return the chunk, (1, H, *action_shape)."""
        policy = self.policy
        seen = dict(zip(self.names, values, strict=False))
        observation = policy.normalize_observation(seen)
        if policy.noise_shape is not None:
            actions = policy.sample_from_noise(observation, values[-1])
        else:
            actions = policy.sample_actions(observation)
        return policy.unnormalize_action(actions.reshape(*actions.shape[:2], *policy.action_shape), seen)


def export_policy(policy: nn.Module, directory: str | Path, kind: str = "torch") -> Exported:
    """Write a policy to a directory, read it back, and compare what both do.

    Args:
        policy: A built policy.
        directory: Where the graph and manifest.json go.
        kind: torch (torch.export) or onnx.
    """
    if kind not in FILES:
        raise ConfigError(f"format {kind!r} is unknown; one of {', '.join(FILES)}")
    if not isinstance(policy, PolicyModule):
        raise ConfigError(
            f"a {type(policy).__name__} cannot be exported: it does not say what it sees; derive it from "
            "etude.policies.PolicyModule"
        )
    if kind == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_extra(package, "sim")
    policy.require_built()
    given, policy = policy, copy.deepcopy(policy).cpu().eval().requires_grad_(False)
    for tensor in (*policy.parameters(), *policy.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)  # archives keep plain rows best
    manifest = _describe(policy, kind)
    graph = ChunkGraph(policy, [entry["feature"] for entry in manifest["inputs"]])
    program = _trace(graph, _examples(manifest, seed=0))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILES[kind]
    content = _to_bytes(program, kind, directory, _input_names(manifest))
    difference = _compare(graph, ExportedPolicy(manifest, open_graph(kind, file, content)))
    manifest["sha256"] = hashlib.sha256(content).hexdigest()
    # The manifest tells the graph's hash, so it comes last.
    write_atomically(file, content)
    text = json.dumps(manifest, indent=2, allow_nan=False) + "\n"
    write_atomically(directory / MANIFEST_FILE, text.encode())
    write_card(given, directory, 'from etude.deploy import load_exported\n\npolicy = load_exported(".")')
    return Exported(file, directory / MANIFEST_FILE, difference)


def write_components(policy: nn.Module, directory: str | Path) -> list[str]:
    """Write the weights of each component of a policy as `{component}.safetensors`; return the names of the files.

    Statistics go beside them as dataset_stats.json. These are files for other programs and for `load_dir`; a policy
    that is to act is exported as a graph, or pretrained.
    """
    if not isinstance(policy, nn.ModuleDict):
        raise ConfigError(f"a {type(policy).__name__} is not made of components; use --format pretrained")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    contents = {f"{name}.safetensors": weights_as_bytes(component) for name, component in policy.items()}
    statistics = getattr(policy, "statistics", None)
    if statistics is not None:
        contents["dataset_stats.json"] = (json.dumps(statistics.to_json(), indent=2) + "\n").encode()
    for name, content in contents.items():
        write_atomically(directory / name, content)
    write_card(policy, directory, 'from safetensors.torch import load_file\n\nweights = load_file("NAME.safetensors")')
    return list(contents)


def _describe(policy: PolicyModule, kind: str) -> dict[str, Any]:
    seen = {name: feature for name, feature in policy.spec.features.items() if policy.looks_at(name, feature)}
    time = () if policy.observation_delta_indices is None else (len(policy.observation_delta_indices),)
    noise = None if policy.noise_shape is None else list(policy.noise_shape)
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "file": FILES[kind],
        "policy": describe(policy, {})["policy"] or type(policy).__name__,
        "torch_version": str(torch.__version__),
        # Shapes without the leading batch dimension, which is 1.
        "inputs": [
            {"feature": name, "shape": [*time, *feature.shape], "dtype": _dtype(feature)}
            for name, feature in seen.items()
        ],
        "noise": noise,
        "action": policy.action_name,
        "output": {"shape": [policy.horizon, *policy.action_shape]},
        "horizon": policy.horizon,
        "observation_steps": policy.observation_delta_indices,
        "executor": policy.executor.settings(),
        "spec": spec_to_json(policy.spec),
    }


def _dtype(feature: Feature) -> str:
    if feature.role == "task":
        return "int64"
    return "uint8" if feature.role == "image" and not feature.dtype.startswith("float") else "float32"


def _examples(manifest: dict[str, Any], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    values: list[Tensor] = []
    for entry in manifest["inputs"]:
        shape = (1, *entry["shape"])
        if entry["dtype"] == "uint8":
            values.append(torch.randint(256, shape, generator=generator).to(torch.uint8))
        elif entry["dtype"] == "int64":
            values.append(torch.zeros(shape, dtype=torch.int64))
        else:
            values.append(torch.randn(shape, generator=generator))
    if manifest["noise"] is not None:
        values.append(torch.randn(1, *manifest["noise"], generator=generator))
    return tuple(values)


def _trace(graph: ChunkGraph, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        chunks = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            chunks.append(graph(*examples))
        if not torch.equal(*chunks):
            raise ConfigError(
                f"{type(graph.policy).__name__} draws noise while it denoises, which a graph cannot repeat; for "
                "Diffusion use sampler: ddim, or serve the policy instead"
            )
        return torch.export.export(graph, examples)


def _input_names(manifest: dict[str, Any]) -> list[str]:
    names = [entry["feature"].replace(".", "_") for entry in manifest["inputs"]]
    return [*names, "noise"] if manifest["noise"] is not None else names


def _to_bytes(program: torch.export.ExportedProgram, kind: str, directory: Path, input_names: list[str]) -> bytes:
    if kind == "torch":
        return write_archive(program)
    temp = directory / f"{temp_name('export')}{Path(FILES[kind]).suffix}"
    try:
        _write_onnx(program, temp, input_names)
        return temp.read_bytes()
    finally:
        remove(temp)


def _write_onnx(program: torch.export.ExportedProgram, path: Path, input_names: list[str]) -> None:
    # One misses torchvision, which nothing here uses; the other says six times what it left as it was.
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates what its own exporter does
            written = torch.onnx.export(
                program, (), dynamo=True, input_names=input_names, output_names=["chunk"], verbose=False
            )
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
    if written is None:
        raise CheckpointError("torch.onnx made no program of this policy")
    written.save(str(path), external_data=False)


def _compare(graph: ChunkGraph, exported: ExportedPolicy) -> float:
    """Return how far the exported chunks lie from the module's; refuse what is not the same policy."""
    largest = 0.0
    with torch.no_grad():
        for seed in (1, 2, 3):
            examples = _examples(exported.manifest, seed)
            expected = graph(*examples).double()
            difference = float((exported._graph(list(examples)).double() - expected).abs().max())
            largest = max(largest, difference)
            if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise CheckpointError(
                    f"the exported {exported.name} acts differently from the module: actions differ by {difference:.1e}"
                )
    return largest
