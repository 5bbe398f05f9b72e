"""The policy's weights for whoever acts with it: an actor that hands on references, never the weights themselves.

Whoever trains puts arrays into Ray's store and tells the actor where they are; whoever acts fetches them from there.
Imports no torch, so that it starts soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

NAME = "policy_state_manager"
PREFIXES = ("module.", "_orig_mod.")
"""What wrappers (DistributedDataParallel, torch.compile) put before the names of what they wrap."""


class StateManager:
    """The newest weights and their version.

    A version is any number that differs from those before it; 0 is no weights at all. Each consumer keeps its own, so
    that all of them see every update. Started again after it was killed, it has none until they are published again.
    """

    def __init__(self) -> None:
        self._version = 0
        self._weights: list[Any] = []
        self._about: list[Any] = []
        self._served: dict[str, int] = {}

    def update_weights(self, weights: Any, version: int | None = None) -> int:
        """Take new weights, and return their version.

        Args:
            weights: A reference wrapped in a list, `[ray.put(arrays)]`, which costs nothing however large they are, and
                lasts as long as the process that put them there; or the weights themselves, by name, or by name within
                each component, which last as long as this actor.
            version: Their version; None counts on.
        """
        self._weights = list(weights) if is_reference(weights) else [ray.put(unwrapped(weights))]
        self._version = self._version + 1 if version is None else version
        return self._version

    update_state = update_weights

    def get_weights(self, have: int = 0) -> tuple[int, list[Any] | None]:
        """Return the version and, unless it is the one that the consumer has, a list with a reference to the weights.

        The list keeps Ray from fetching them here: `ray.get(found[0])` gets them, once for each host.
        """
        return self._version, self._weights if self._version != have and self._weights else None

    def get_state(self, consumer: str = "") -> Any:
        """Return the weights themselves, or None for a consumer, known by its name, that has got them before."""
        if not self._weights or self._served.get(consumer) == self._version:
            return None
        self._served[consumer] = self._version
        return ray.get(self._weights[0])

    def version(self) -> int:
        """Return the version of the newest weights."""
        return self._version

    def introduce(self, about: Any) -> None:
        """Take what one must know about the policy to act with its weights, or a reference to it in a list."""
        self._about = list(about) if is_reference(about) else [ray.put(about)]

    def about(self) -> list[Any]:
        """Return what `introduce` took; an empty list if nothing yet."""
        return self._about


def is_reference(weights: Any) -> bool:
    """Tell whether weights are given by reference: in a list, for Ray would fetch a bare one on the way."""
    is_list = isinstance(weights, list | tuple) and len(weights) == 1
    return is_list and isinstance(weights[0], ray.ObjectRef)


def unwrapped(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights under the names that they have in the policy itself, whatever wraps it; components alike."""
    if weights and all(isinstance(value, Mapping) for value in weights.values()):
        return {component: unwrapped(value) for component, value in weights.items()}
    found = dict(weights)
    while prefix := next((one for one in PREFIXES if found and _all_begin(found, one)), ""):
        found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _all_begin(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def fetch_weights(manager: Any, have: int = 0) -> tuple[int, Mapping[str, Any] | None]:
    """Return the version of the newest weights and, unless the caller has them, the weights.

    Arrays lie in Ray's store and cannot be written to. Weights that went with the process that put them there count as
    none: it publishes them again when it is back.
    """
    version, found = ray.get(manager.get_weights.remote(have))
    if found is None:
        return version, None
    try:
        weights: Mapping[str, Any] = ray.get(_first(found))
    except (ray.exceptions.ObjectLostError, ray.exceptions.ObjectFetchTimedOutError):
        return have, None
    return version, weights


def _first(found: Sequence[Any]) -> Any:
    return found[0]
