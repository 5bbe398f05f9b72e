"""The two actors through which acting and training meet, by name: `replay_buffer` and `policy_state_manager`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from etude.engines.ray import replay, state_manager
from etude.errors import ConfigError

untyped: Any = ray
NAMESPACE = "online_rl"
"""Where actors are looked for beside the job's own namespace."""
NAMES_WITHIN_S = 30.0
"""Time for actors of an earlier run in this process to be gone, with their names."""


@dataclass(frozen=True)
class Actors:
    """Handles of the two actors."""

    replay_buffer: Any
    policy_state_manager: Any

    def end(self) -> None:
        """End both."""
        for actor in (self.replay_buffer, self.policy_state_manager):
            untyped.kill(actor)


def start_actors(folder: str | Path | None = None, *, namespace: str | None = None, **buffer: Any) -> Actors:
    """Start `replay_buffer` and `policy_state_manager`; they end with this process or job.

    Args:
        folder: Where episodes are kept, so that a killed actor comes back with them; None keeps them in memory alone.
        namespace: Where they are found; None is the job's own.
        buffer: `max_frames`, `max_bytes` and `sampling` of the buffer.
    """
    kept = None if folder is None else str(Path(folder).absolute())
    manager = _start(state_manager.StateManager, state_manager.NAME, namespace)
    return Actors(_start(replay.ReplayActor, replay.NAME, namespace, kept, **buffer), manager)


def beside_driver() -> Any:
    """Return a place on the node of this process: the loss of another node is then no loss of what is put there."""
    # Not softly: Ray then also chooses other nodes that have room. Without its own node a driver does not go on.
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _start(kind: type, name: str, namespace: str | None, *args: Any, **options: Any) -> Any:
    settings = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": beside_driver()}
    made = untyped.remote(**settings, name=name, namespace=namespace)(kind)
    deadline = time.monotonic() + NAMES_WITHIN_S
    while True:
        try:
            return made.remote(*args, **options)
        except ValueError as error:  # the name is taken
            if time.monotonic() > deadline:
                place_of = namespace or ray.get_runtime_context().namespace
                raise ConfigError(
                    f"an actor called {name!r} is there already in the namespace {place_of!r}; end it, or use another "
                    "namespace"
                ) from error
            time.sleep(0.1)


def find_actors(namespace: str | None = None) -> Actors:
    """Return the actors of a namespace, or else of the job's own or of `online_rl`; say which one is missing."""
    places = [namespace] if namespace else [ray.get_runtime_context().namespace, NAMESPACE]
    return Actors(_find(replay.NAME, places), _find(state_manager.NAME, places))


def _find(name: str, places: list[str]) -> Any:
    for place in places:
        try:
            return untyped.get_actor(name, namespace=place)
        except ValueError:
            continue
    listed = " and ".join(repr(place) for place in dict.fromkeys(places))
    raise ConfigError(
        f"no actor called {name!r} runs in the namespace {listed} of this Ray cluster; start it there "
        "(etude.engines.ray.start_actors), or give train_func its namespace: {'config_path': ..., 'namespace': ...}"
    )
