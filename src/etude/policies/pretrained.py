"""Saved policies: a directory with config.json (what it is) and model.safetensors (what it learned)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from etude.data.statistics import NormStats
from etude.errors import CheckpointError, ConfigError, DataError, RegistryError, one_line
from etude.policies.card import write_card
from etude.policies.hub import is_hub_id
from etude.policies.normalize import act_in_data_units
from etude.policies.spec import spec_from_json, spec_to_json
from etude.reading.plain import map_leaves
from etude.registry import POLICY_REGISTRY
from etude.runs.checkpoint import read_checkpoint
from etude.runs.durable import write_atomically
from etude.runs.manifest import MANIFEST_NAME
from etude.runs.tensor_file import read_tensor_file

if TYPE_CHECKING:
    from etude.policies.base import PolicyModule

FORMAT = "etude-policy"
SCHEMA_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def describe(policy: PolicyModule, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything but the weights of a policy as JSON values."""
    kind = own_class(policy)
    description = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "policy": POLICY_REGISTRY.key_of(kind),
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "params": map_leaves(params, _plain),
        "executor": policy.executor.settings(),
        "spec": spec_to_json(policy.spec) if hasattr(policy, "spec") else None,
    }
    try:
        json.dumps(description, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{kind.__name__} cannot be saved: its constructor took a value that JSON cannot hold ({error})"
        ) from None
    return description


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as it was written: sharding gives every module one of torch's beside it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))


def save(policy: PolicyModule, description: Mapping[str, Any], directory: Path) -> None:
    """Write a policy to a directory, each file in one step; the description, which tells the weights' hash, last."""
    content = weights_as_bytes(policy)
    directory.mkdir(parents=True, exist_ok=True)
    complete = {**description, "weights_sha256": hashlib.sha256(content).hexdigest()}
    write_atomically(directory / WEIGHTS_FILE, content)
    write_atomically(directory / CONFIG_FILE, (json.dumps(complete, indent=2, allow_nan=False) + "\n").encode())
    write_card(policy, directory)


def weights_as_bytes(module: nn.Module) -> bytes:
    """Return the state dictionary of a module as the content of a safetensors file."""
    from safetensors.torch import save as to_bytes

    tensors: dict[str, Tensor] = {
        name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()
    }
    content: bytes = to_bytes(tensors, {"format": "pt"})
    return content


def load(kind: type[PolicyModule], directory: Path) -> Any:
    """Return the policy saved in a directory or in a checkpoint; it must be a `kind`."""
    if not (directory / CONFIG_FILE).exists() and (directory / MANIFEST_NAME).exists():
        return from_tree(kind, read_checkpoint(directory).tree, str(directory))
    description = _read_description(directory)
    weights = directory / WEIGHTS_FILE
    try:
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
        if digest != description.get("weights_sha256"):
            raise ValueError("it is not the file that was saved (its hash differs)")
        tensors = read_tensor_file(weights)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the policy's weights {weights}: {error}") from None
    policy = from_description(kind, description, str(directory / CONFIG_FILE))
    return _with_weights(policy, tensors, f"the weights {weights} do not fit the policy in {CONFIG_FILE}")


def from_tree(kind: type[PolicyModule], tree: Mapping[str, Any], source: str) -> PolicyModule:
    """Return the policy in the state of a checkpoint, of a run or of Lightning's Trainer; it must be a `kind`."""
    if "lightning" in tree:
        description, weights = tree["lightning"].get("policy"), tree["model"]
        weights = {name.removeprefix("policy."): value for name, value in weights.items()}
        if description is None:
            instead = "load it with YourModule.load_from_checkpoint"
            raise CheckpointError(f"{source} holds a LightningModule, not a policy by itself; {instead}")
    else:
        description, weights = tree.get("session", {}).get("policy"), {**tree.get("policy", {}), **tree.get("ema", {})}
    if description is None:
        raise CheckpointError(f"{source} does not say which policy it holds, so it cannot be loaded as one")
    return _with_weights(from_description(kind, description, source), weights, f"{source}: the weights do not fit")


def _with_weights(policy: PolicyModule, weights: Mapping[str, Tensor], complaint: str) -> PolicyModule:
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{complaint}: {one_line(error, 300)}") from None
    return policy.eval()


def from_description(kind: type[PolicyModule], description: Mapping[str, Any], source: str) -> PolicyModule:
    """Make the described policy, built, with weights that are still to be loaded."""
    found = _find_class(kind, description, source)
    try:
        policy: PolicyModule = found(**description["params"])
        policy.is_restored = True
        policy.build(spec_from_json(description["spec"]) if description["spec"] or policy.needs_spec else None)  # type: ignore[arg-type]
        policy.set_execution(**description["executor"])
        if "norm_stats" in description:
            act_in_data_units(policy, NormStats(description["norm_stats"]))
    except (ConfigError, DataError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source} does not describe a {found.__name__} of this Etude: {error}") from error
    return policy


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        description = json.loads(path.read_bytes())
    except FileNotFoundError:
        what = "there is no such directory" if not directory.is_dir() else f"it has no {CONFIG_FILE}"
        pull = f"; `etude pull {directory}` fetches one from the Hugging Face hub" if is_hub_id(str(directory)) else ""
        hint = "; load_policy takes a run, or a folder of checkpoints" if directory.is_dir() else pull
        raise CheckpointError(f"{directory} is not a saved policy: {what}{hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the saved policy {path}: {error}") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        if isinstance(description, dict) and "input_features" in description and "type" in description:
            hint = f"read it with: etude import {directory} --output DIR"
            raise CheckpointError(f"{path} is a policy of LeRobot's, not of Etude's; {hint}")
        raise CheckpointError(f"{path} was not written by Etude's save_pretrained; it cannot be loaded as a policy")
    version = description.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise CheckpointError(f"{path} has schema version {version}, this Etude reads {SCHEMA_VERSION}; upgrade Etude")
    return description


def _find_class(kind: type[PolicyModule], description: Mapping[str, Any], source: str) -> Any:
    key, home = description.get("policy"), description.get("class")
    own = f"{kind.__module__}:{kind.__qualname__}"
    if home == own or (key is not None and key == POLICY_REGISTRY.key_of(kind)):
        return kind
    name = str(home).partition(":")[2]
    # A class of a script is `__main__:Mine` where the script runs, and `script:Mine` where it is imported.
    if key is None and name == kind.__qualname__:
        return kind
    # Only what is registered is imported: a file must not be able to name code to run.
    try:
        found: Any = POLICY_REGISTRY.get(str(key)) if key is not None else None
    except RegistryError as error:
        raise CheckpointError(f"{source}: {error}; load the plugin that registers it first") from None
    if found is None:
        short = name.rpartition(".")[2]
        raise CheckpointError(
            f"{source} holds a {name}, which is not registered; say which class that is: "
            f"load_policy(path, cls={short}) or {short}.from_pretrained(path)"
        )
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise CheckpointError(f"{source} holds a policy {key!r}, no {kind.__name__}; use PolicyModule.from_pretrained")
    return found


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
