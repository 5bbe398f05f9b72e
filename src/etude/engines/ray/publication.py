"""How weights get from whoever trains to whoever acts: as arrays in Ray's store, in the names of the policy itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import nn

from etude.engines.ray.shipping import to_array, to_tensor
from etude.engines.ray.state_manager import fetch_weights
from etude.errors import ConfigError
from etude.loop.precision import Precision
from etude.policies.normalize import act_in_data_units

if TYPE_CHECKING:
    from etude.loop.session import Session

LOOK_EVERY_S = 1.0
"""How often the trainer makes sure that the state manager still has the weights."""


class Publisher:
    """Publishes the weights of a session; a state manager that was killed and is back gets them again.

    Args:
        manager: Handle of the state manager: ours, or any actor with `update_weights` or `update_state`.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._is_ours = hasattr(manager, "get_weights") and hasattr(manager, "introduce")
        self.version = 0
        self.steps: dict[int, int] = {}
        """The optimizer step of each version that was published here."""
        self._about: list[Any] = []
        self._weights: list[Any] = []
        self._asked: Any = None
        self._looked_s = 0.0

    def publish(self, session: Session, step: int, *, is_last: bool = False) -> None:
        """Publish the weights as they are; every rank must call, and rank 0 does it.

        The last ones are sent to the state manager themselves, for what this process has put into Ray's store goes with
        it.
        """
        with session.shown_weights():
            weights = session.strategy.state_dict()
            if session.group.is_main:
                self._put(session, weights, step, is_last)

    def _put(self, session: Session, weights: Mapping[str, Any], step: int, is_last: bool) -> None:
        parts = _still_parts(session.policy)
        still = {name for name in weights if name.partition(".")[0] in parts}
        if self._is_ours and (is_last or not self._weights):
            self._introduce(session, {name: to_array(weights[name]) for name in still}, is_last)
        arrays: dict[str, Any] = {name: to_array(value) for name, value in weights.items() if name not in still}
        arrays = _by_component(arrays) if isinstance(session.policy, nn.ModuleDict) else arrays
        self._weights = [ray.put(arrays)]  # the one copy that is made
        self.version += 1
        self.steps[self.version] = step
        while len(self.steps) > 1000:
            del self.steps[next(iter(self.steps))]
        self._send(self._weights[0] if is_last else self._weights)

    def _introduce(self, session: Session, still: Mapping[str, Any], is_last: bool) -> None:
        """Say once what one must know to act with the weights, and go on from the versions that were there."""
        spec = session.data.spec if hasattr(session.policy, "build") else None
        about = {"spec": spec, "statistics": session.statistics, "precision": session.config.precision, "still": still}
        self._about = [ray.put(about)]
        ray.get(self._manager.introduce.remote(self._about[0] if is_last else self._about))
        self.version = max(self.version, ray.get(self._manager.version.remote()))

    def _send(self, weights: Any) -> None:
        """Send a reference, in a list; or a bare one, which Ray hands on as the weights themselves."""
        if self._is_ours:
            told = self._manager.update_weights.remote(weights, self.version)
            if not isinstance(weights, list):
                ray.get(told)  # references are not waited for: `keep_up` sees whether they have come
            return
        update = getattr(self._manager, "update_weights", None) or self._manager.update_state
        ray.get(update.remote(self._weights[0]))

    def keep_up(self) -> None:
        """Publish again what a state manager has lost; asked now and then, without waiting for the answer."""
        now = time.monotonic()
        if not self._is_ours or not self._weights or now - self._looked_s < LOOK_EVERY_S:
            return
        if self._asked is None:
            self._asked = self._manager.version.remote()
        elif ray.wait([self._asked], timeout=0)[0]:
            found, self._asked, self._looked_s = ray.get(self._asked), None, now
            if found != self.version:
                ray.get(self._manager.introduce.remote(self._about))
                self._send(self._weights)


def _still_parts(policy: nn.Module) -> set[str]:
    """Return the parts of a policy that no training changes: all of their parameters are frozen."""
    found = set()
    for name, part in policy.named_children():
        parameters = list(part.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            found.add(name)
    return found


def _by_component(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in weights.items():
        component, _, rest = name.partition(".")
        found.setdefault(component, {})[rest] = value
    return found


class Follower:
    """A policy that follows the published weights, for whoever acts with it.

    Args:
        policy: The policy as it was before training; one that takes its shapes from the data need not be built.
        manager: Handle of the state manager.
    """

    def __init__(self, policy: nn.Module, manager: Any) -> None:
        self.policy, self._manager = policy, manager
        self.version = 0
        """That of the weights which the policy has; 0 is none."""

    def refresh(self) -> bool:
        """Take the newest weights; return whether the policy has any."""
        version, weights = fetch_weights(self._manager, self.version)
        if weights is None:
            return bool(self.version)
        arrays = _flat(weights)
        if not self.version and not self._begin(arrays):
            return False
        self.policy.load_state_dict({name: to_tensor(value) for name, value in arrays.items()}, strict=False)
        self.version = version
        return True

    def _begin(self, arrays: Mapping[str, Any]) -> bool:
        found = ray.get(self._manager.about.remote())
        if not found:
            return False
        try:
            about = ray.get(found[0])
        except ray.exceptions.ObjectLostError:
            return False
        if getattr(self.policy, "is_built", True) is False:
            self.policy.build(about["spec"])  # type: ignore[operator]
        Precision(about["precision"], torch.device("cpu")).convert(self.policy)
        if about["statistics"] is not None:
            act_in_data_units(self.policy, about["statistics"])
        still = about["still"]
        if differ := sorted(self.policy.state_dict().keys() ^ (arrays.keys() | still.keys())):
            raise ConfigError(f"the published weights are those of another policy than the one that acts: {differ[0]}")
        self.policy.load_state_dict({name: to_tensor(value) for name, value in still.items()}, strict=False)
        return True


def _flat(weights: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in weights.items():
        inside = {f"{name}.{inner}": one for inner, one in value.items()} if isinstance(value, Mapping) else {}
        found |= inside or {name: value}
    return found
