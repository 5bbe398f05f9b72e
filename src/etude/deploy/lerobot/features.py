"""What a policy sees and does, by LeRobot's names and types; what these cannot say is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from etude.errors import CheckpointError, ConfigError
from etude.policies.base import PolicyModule
from etude.types import Feature

STATE, ENVIRONMENT, ACTION = "observation.state", "observation.environment_state", "action"
Role = Literal["state", "environment", "image", "action"]
TYPES: Mapping[str, str] = {"state": "STATE", "environment": "ENV", "image": "VISUAL", "action": "ACTION"}
_ROLES: Mapping[str, Role] = {"STATE": "state", "ENV": "environment", "VISUAL": "image", "ACTION": "action"}


@dataclass(frozen=True)
class Exchanged:
    """One feature under both names."""

    ours: str
    theirs: str
    role: Role
    shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the feature as LeRobot writes it."""
        return {"type": TYPES[self.role], "shape": list(self.shape)}


def describe_features(policy: PolicyModule) -> list[Exchanged]:
    """Return the features of a policy in the order of LeRobot's config: state, cameras, environment, action."""
    name = type(policy).__name__
    if policy.derived:
        raise ConfigError(
            f"LeRobot's {name} computes no features, and this one derives {', '.join(policy.derived)}; export it as "
            "torch or onnx, where they are part of the graph"
        )
    if policy.normalizer.origin is not None:
        raise ConfigError(
            f"LeRobot's {name} has absolute actions, and those of this one are relative to what it sees; export it as "
            "torch or onnx, where that is part of the graph"
        )
    seen = {key: one for key, one in policy.spec.features.items() if policy.looks_at(key, one)}
    for key, one in seen.items():
        if one.role not in TYPES:
            raise ConfigError(f"LeRobot's {name} does not read {key}, a {one.role}; train without it to export there")
        if one.role != "image" and len(one.shape) != 1:
            raise ConfigError(f"LeRobot wants vectors, but {key} has the shape {list(one.shape)}")
        if not key.startswith("observation."):
            raise ConfigError(f"LeRobot knows observations by names that begin with 'observation.'; rename {key}")
    action = policy.spec[policy.action_name]
    if len(action.shape) != 1 or action.classes is not None:
        raise ConfigError(f"LeRobot wants actions that are vectors of numbers, not {policy.action_name} as it is")
    found = [*_single(seen, "state", STATE), *_cameras(seen), *_single(seen, "environment", ENVIRONMENT)]
    if not any(one.role in ("image", "environment") for one in found):
        raise ConfigError(
            f"LeRobot's {name} wants a camera, or {ENVIRONMENT} beside {STATE}; this policy sees only "
            f"{', '.join(seen)}, so it cannot be written for LeRobot"
        )
    return [*found, Exchanged(policy.action_name, ACTION, "action", action.shape)]


def _single(seen: Mapping[str, Feature], role: Role, theirs: str) -> list[Exchanged]:
    names = [name for name, one in seen.items() if one.role == role]
    if len(names) > 1:
        raise ConfigError(
            f"LeRobot reads one {role}, {theirs}; this policy sees {', '.join(names)}: record them as one"
        )
    return [Exchanged(name, theirs, role, tuple(seen[name].shape)) for name in names]


def _cameras(seen: Mapping[str, Feature]) -> list[Exchanged]:
    found = [Exchanged(name, name, "image", tuple(one.shape)) for name, one in seen.items() if one.role == "image"]
    for one in found:
        if one.shape[0] != 3:
            raise ConfigError(f"LeRobot's backbones read 3 channels, but {one.ours} has {one.shape[0]}")
    return sorted(found, key=lambda one: one.ours)


def read_features(config: Mapping[str, Any], renamed: Mapping[str, str], source: str) -> list[Exchanged]:
    """Return the features that LeRobot's config.json speaks of, in its order.

    Args:
        config: What is in config.json.
        renamed: From names in observations to names in the config, as the preprocessor renames them.
        source: Where the config lies, for messages.
    """
    given = {theirs: ours for ours, theirs in renamed.items()}
    found = []
    for group in ("input_features", "output_features"):
        for name, entry in (config.get(group) or {}).items():
            role = _ROLES.get(entry.get("type"))
            if role is None:
                raise CheckpointError(
                    f"{source}: the feature {name} is of the type {entry.get('type')!r}, which no policy reads here"
                )
            shape = tuple(int(length) for length in entry["shape"])
            _check_name(name, role, source)
            if len(shape) != (3 if role == "image" else 1):
                raise CheckpointError(f"{source}: {name} of the type {entry['type']} has the shape {list(shape)}")
            if role == "image" and shape[0] != 3:
                raise CheckpointError(f"{source}: {name} has {shape[0]} channels; images of 3 can be read")
            found.append(Exchanged(given.get(name, name), name, role, shape))
    for role in ("state", "environment", "action"):
        same = [one.theirs for one in found if one.role == role]
        if len(same) > 1 or (role == "action" and not same):
            raise CheckpointError(f"{source} has {len(same)} features for the {role}: {', '.join(same) or 'none'}")
    return found


def _check_name(name: str, role: Role, source: str) -> None:
    wanted = {"state": STATE, "environment": ENVIRONMENT, "action": ACTION}.get(role, name)
    if name != wanted:
        raise CheckpointError(f"{source}: the {role} is called {name}, where LeRobot reads {wanted}")
