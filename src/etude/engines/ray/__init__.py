"""Ray: workers of Ray Train, on this machine or on a cluster, that run the torch engine's session.

Beside them stand two actors through which acting and training meet, for runs that learn while they act. Inside this
package `import ray` means the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.config.ray_function import train_func
    from etude.engines.ray.actors import Actors, find_actors, start_actors
    from etude.engines.ray.engine import RayEngine
    from etude.engines.ray.state_manager import fetch_weights

__all__ = ["Actors", "RayEngine", "fetch_weights", "find_actors", "start_actors", "train_func"]
_HOMES = {
    "engine": ("RayEngine",),
    "actors": ("Actors", "find_actors", "start_actors"),
    "state_manager": ("fetch_weights",),
    "..config.ray_function": ("train_func",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES, {"ray": "ray"})
