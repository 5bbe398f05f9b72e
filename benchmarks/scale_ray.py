"""What acting beside training sends through Ray against the number of rollout workers: calls and bytes, never time.

Counters stand around the methods of the two actors, which run on a Ray of their own. Rollout workers play one after the
other in this process, then one rank of a trainer makes its updates: whoever waits for nobody makes the same calls in
any order. `python -m benchmarks.scale` prints what is counted here below its own table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from benchmarks.ray_online import make_policy
from etude import Trainer, TrainingConfiguration
from etude.algorithms import BehaviorCloning
from etude.engines.ray import cluster, replay, start_actors, state_manager
from etude.engines.ray.actors import Actors
from etude.engines.ray.online import beside_actors
from etude.engines.ray.publication import Publisher
from etude.engines.ray.rollouts import RolloutPlan, RolloutWorker
from etude.engines.ray.shipping import pack
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import SingleProcess
from etude.rollouts.online import OnlineData, OnlineSettings

ENV, EPISODE_STEPS, EPISODES, ROUNDS, UPDATES, BATCH = "gym:Pendulum-v1", 20, 2, 2, 32, 8
ROWS: dict[str, str] = {
    "rollouts: calls an episode": "episode_calls",
    "rollouts: bytes an episode": "episode_bytes",
    "replay: calls of a trainer's rank a step": "draw_calls",
    "replay: bytes of a trainer's rank a step": "draw_bytes",
    "weights: calls a publication": "publication_calls",
    "weights: bytes in these calls": "publication_bytes",
}


def bytes_of(value: Any) -> int:
    """Return the bytes of the arrays in what is sent; a reference has none."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


def counted(kind: type, names: tuple[str, ...]) -> type:
    """Return a class of actors whose calls are counted, with the bytes that come and go."""

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(kind, name)

        def method(self: Any, *args: Any, **options: Any) -> Any:
            inside, self.__dict__["counting"] = self.__dict__.get("counting", False), True
            try:
                found = real(self, *args, **options)
            finally:
                self.__dict__["counting"] = inside
            if not inside:  # what a method asks of its own actor is no message
                tally = self.__dict__.setdefault("tallied", Counter())
                tally[name] += 1
                tally[f"{name} bytes"] += bytes_of([args, options, found])
            return found

        return method

    def tally(self: Any) -> Counter[str]:
        return Counter(self.__dict__.get("tallied", {}))

    return type(f"Counted{kind.__name__}", (kind,), {"tally": tally, **{name: wrap(name) for name in names}})


@contextmanager
def counted_actors(**buffer: Any) -> Iterator[Actors]:
    """Start the two actors with counters around them."""
    kinds = replay.ReplayActor, state_manager.StateManager
    changed: Any = replay, state_manager
    changed[0].ReplayActor = counted(kinds[0], ("add", "claim", "draw", "allow"))
    changed[1].StateManager = counted(kinds[1], ("update_weights", "get_weights"))
    try:
        actors = start_actors(**buffer)
    finally:
        changed[0].ReplayActor, changed[1].StateManager = kinds
    yield actors
    actors.end()


def tally_of(actors: Actors) -> Counter[str]:
    """Return what was counted so far at both."""
    both = (actors.replay_buffer, actors.policy_state_manager)
    return sum((ray.get(actor.tally.remote()) for actor in both), Counter())


def count(workers: int) -> dict[str, float]:
    """Play with so many rollout workers, train as one rank, and return what that sent."""
    settings = OnlineSettings(
        ENV, options={"max_steps": EPISODE_STEPS, "render": False}, keep="all", episodes_per_round=workers,
        updates_per_round=UPDATES, workers=workers,
    )  # fmt: skip
    config = TrainingConfiguration(training_steps=ROUNDS * UPDATES, batch_size=BATCH, device="cpu", num_threads=1)
    trainer = Trainer(
        make_policy(ENV), OnlineData(None, settings, share=None), BehaviorCloning(), config=config, run=False,
        loggers=[], show_progress=False,
    )  # fmt: skip
    with counted_actors() as actors:
        crew = make_workers(trainer, settings, actors)
        published = tally_of(actors)
        for worker in crew:
            worker._play(EPISODES)
        played = tally_of(actors) - published
        trainer.data = beside_actors(OnlineData(None, settings, share=None), actors)
        trainer.fit()
        drawn = tally_of(actors) - played - published
    episodes, steps = workers * EPISODES, ROUNDS * UPDATES
    return {
        "episode_calls": total(played, ("get_weights", "claim", "add")) / episodes,
        "episode_bytes": played["add bytes"] / episodes,
        "draw_calls": total(drawn, ("draw", "allow")) / steps,
        "draw_bytes": drawn["draw bytes"] / steps,
        "publication_calls": published["update_weights"],
        "publication_bytes": published["update_weights bytes"],
    }


def total(tally: Counter[str], names: Sequence[str]) -> float:
    """Return how many calls of some names there were."""
    return float(sum(tally[name] for name in names))


def make_workers(trainer: Trainer, settings: OnlineSettings, actors: Actors) -> list[RolloutWorker]:
    """Publish the weights once, and return workers that play with them."""
    plan = ray.put(RolloutPlan(trainer.policy, settings, 0))
    parcel = [ray.put(replace(pack(trainer, None, ray.put), trainer=plan))]
    group = Group()
    with Session(trainer, group, SingleProcess(group)).running("never") as session:
        Publisher(actors.policy_state_manager).publish(session, 0)
    return [RolloutWorker(number, parcel, actors, None, {}) for number in range(settings.workers)]


def count_all(numbers: Sequence[int]) -> list[dict[str, float]]:
    """Return what was counted for each number of workers, on a Ray that ends with it."""
    with cluster.quiet(), cluster.connected("local", 1, False):
        return [count(number) for number in numbers]
