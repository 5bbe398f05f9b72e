"""An exported policy at work: the graph makes chunks, the same executor as everywhere turns them into actions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etude.errors import CheckpointError, DataError
from etude.extras import import_extra
from etude.policies.executor import Executing
from etude.policies.spec import spec_from_json
from etude.types import Feature

FORMAT, SCHEMA_VERSION = "etude-export", 1
MANIFEST_FILE = "manifest.json"
Graph = Callable[[list[Tensor]], Tensor]
"""From the inputs in the manifest's order, each with a batch of one, to a chunk (1, H, *A) in the data's units."""


class ExportedPolicy(Executing):
    """What `load_exported` returns: acts like the policy that was exported, without its code.

    Args:
        manifest: What `export_policy` wrote beside the graph.
        graph: Computes one chunk.
    """

    def __init__(self, manifest: Mapping[str, Any], graph: Graph) -> None:
        self.name = str(manifest["policy"])
        self.manifest, self._graph = dict(manifest), graph
        self.spec = spec_from_json(manifest["spec"])
        self.action_name = str(manifest["action"])
        self.horizon = int(manifest["horizon"])
        self._inputs = [(str(i["feature"]), tuple(i["shape"]), str(i["dtype"])) for i in manifest["inputs"]]
        self._noise_shape = manifest["noise"]
        self._wanted = {name for name, _, _ in self._inputs}
        self.set_execution(**manifest["executor"])

    @property
    def observation_delta_indices(self) -> list[int] | None:
        """Distances in frames of the observations that the policy sees."""
        steps: list[int] | None = self.manifest["observation_steps"]
        return steps

    def looks_at(self, name: str, feature: Feature) -> bool:
        """Tell whether a feature is part of the observation."""
        return name in self._wanted

    @torch.no_grad()
    def predict_action_chunk(self, batch: Mapping[str, Any]) -> Tensor:
        """Return actions in the data's units, (B, H, *action_shape), the first one for now."""
        columns = [self._column(batch, *entry) for entry in self._inputs]
        rows = columns[0].shape[0]
        if self._noise_shape is not None:  # drawn for all rows at once, as the policy itself does
            columns.append(torch.randn(rows, *self._noise_shape))
        chunks = [self._graph([column[row : row + 1] for column in columns]) for row in range(rows)]
        return torch.cat(chunks)

    def select_action(self, observation: Mapping[str, Any], slots: Sequence[int] | None = None) -> Tensor:
        """Return the action for this step, (B, *action_shape), in the data's units.

        Args:
            observation: What each slot sees now, (B, ...), without a time dimension.
            slots: The slot of each row; the row's number unless given.
        """
        if missing := sorted(self._wanted - set(observation)):
            raise DataError(
                f"{self.name} sees {', '.join(missing)}, but the observation has only {sorted(observation)}"
            )
        seen = {name: torch.as_tensor(observation[name]) for name, _, _ in self._inputs}
        return self.executor.select(seen, self.predict_action_chunk, slots)

    def reset(self, slots: Sequence[int] | None = None) -> None:
        """Forget plans and history at the start of an episode: of some slots, or of all."""
        self.executor.reset(slots)

    def _column(self, batch: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        if name not in batch:
            raise DataError(f"{self.name} sees {name}, but the observation has only {sorted(batch)}")
        value = torch.as_tensor(batch[name])
        if self.spec[name].role == "task" and value[0].numel() == math.prod(shape):
            value = value.reshape(-1, *shape)  # one number, with or without a dimension of its own
        if tuple(value.shape[1:]) != shape:
            raise DataError(f"{name} has shape {tuple(value.shape[1:])}, {self.name} was exported for {shape}")
        if dtype == "uint8" and value.dtype != torch.uint8:
            raise DataError(f"{name} holds {value.dtype}, {self.name} was exported for images of uint8")
        wanted: torch.dtype = getattr(torch, dtype)
        return value.to(wanted)


def is_exported(directory: Path) -> bool:
    """Tell whether a directory was written by `export_policy`; checkpoints have a manifest, too."""
    try:
        manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def load_exported(directory: str | Path) -> ExportedPolicy:
    """Return the policy that `export_policy` wrote to a directory."""
    directory = Path(directory)
    if not is_exported(directory):
        raise CheckpointError(f"{directory} is no exported policy: no {MANIFEST_FILE} of etude export is in it")
    manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
    version = manifest.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{directory} has schema version {version}, this Etude reads {SCHEMA_VERSION}; upgrade it"
        )
    try:
        path = directory / Path(manifest["file"]).name
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
            raise CheckpointError(f"{path} is not the file that was exported (its hash differs); export it again")
        graph = open_graph(manifest["kind"], path, content)
        return ExportedPolicy(manifest, graph)
    except OSError as error:
        raise CheckpointError(f"{directory}: the exported policy cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST_FILE} does not describe an exported policy: {error}") from None


def open_graph(kind: str, path: Path, content: bytes) -> Graph:
    """Return the graph in a file as a function."""
    if kind == "onnx":
        return _open_onnx(content)
    if kind != "torch":
        raise ValueError(f"its kind is {kind!r}, not torch or onnx")
    from etude.deploy.archive import read_archive

    module = read_archive(path, content)

    def run(inputs: list[Tensor]) -> Tensor:
        chunk: Tensor = module(*inputs)
        return chunk

    return run


def _open_onnx(content: bytes) -> Graph:
    runtime = import_extra("onnxruntime", "sim")
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: list[Tensor]) -> Tensor:
        (chunk,) = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
        return torch.from_numpy(chunk)

    return run
