"""Where a trainer on Ray gets its online rows from: the replay actor, while rollout workers act with its weights.

Rollouts and updates go on at the same time, so that what a batch holds depends on which of them was faster: a run is
not bit for bit another one. How much of each there is stays as configured: rollout workers are at most a round ahead of
the updates, and updates wait for the episodes of their round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray
from torch import Tensor

from etude.data.replay import saved_episodes
from etude.engines.ray.actors import Actors
from etude.engines.ray.publication import Publisher
from etude.engines.ray.replay import Played
from etude.errors import ConfigError, DataError, one_line
from etude.rng import fold
from etude.rollouts.online import OnlineData, OnlineSettings
from etude.types import DataSpec

if TYPE_CHECKING:
    from etude.trainer import Trainer
    from etude.types.protocols import Place

log = logging.getLogger("etude")
Rows = dict[str, NDArray[Any]]
POLL_S = 0.02
PATIENCE_S = 30.0
"""Time after which it is said what an update waits for."""
PUBLICATIONS = 4
"""How often weights are published between one round of episodes and the next."""
LEAST_BATCHES = 2
"""Global batches that must be there before training begins on what others play."""
MESSAGE_BYTES = 4 << 20
"""About how much one message of rows holds: several batches where they are small."""
MOST_AHEAD = 32
"""Batches that one message holds at most; an eighth of a round if that is less."""


class RaySource:
    """Rows of the replay actor for one rank of a trainer, and the trainer's weights for those who act.

    Args:
        actors: The two actors: ours, or any that have `size`, `sample(batch_size=)` and `update_weights`.
    """

    def __init__(self, actors: Actors) -> None:
        self._replay = actors.replay_buffer
        self._is_ours = hasattr(self._replay, "draw")
        self._publisher = Publisher(actors.policy_state_manager)
        self._played = Played()
        self.env_steps = 0
        """Steps simulated by all rollout workers; the first rank counts them."""
        self._allowed: int | None = -1
        self._published_at = -1
        self._said = False
        self._ahead: dict[tuple[Any, ...], DrawnAhead] = {}

    def attach(self, trainer: Trainer, place: Place, settings: OnlineSettings) -> None:
        """Learn who trains, and how many episodes belong to how many updates."""
        self._trainer, self._place, self._settings = trainer, place, settings
        self._is_paced = self._is_ours and bool(settings.env)
        if self._is_ours and not self._is_paced:
            self._require_room(round(place.global_batch * trainer.data.share))  # type: ignore[attr-defined]

    def _require_room(self, rows: int) -> None:
        most = int(ray.get(self._replay.most_frames.remote()))
        if most < rows:
            raise ConfigError(
                f"replay_buffer holds at most {most} frames, less than the {rows} rows of a batch that are drawn from "
                "it; start it with a larger max_frames"
            )

    def ready(self, step: int) -> None:
        """Publish the weights if it is time, and wait until the episodes are there that this update needs."""
        session = self._trainer.session
        every = max(1, self._settings.updates_per_round // PUBLICATIONS)
        if self._published_at < 0 or (step % every == 0 and self._published_at != step):
            self._publisher.publish(session, step)
            self._published_at = step
        patience = time.monotonic() + PATIENCE_S
        while not self._has_enough(step):
            if time.monotonic() > patience and session.group.is_main:
                patience = float("inf")
                log.info("waiting for what others play: replay_buffer has %s", self._described(step))
            session.pulse.enter("data")
            session.heed_signals()
            if session.group.is_main:
                self._publisher.keep_up()
            time.sleep(POLL_S)
        if session.group.is_main:
            self._publisher.keep_up()

    def _has_enough(self, step: int) -> bool:
        if not self._is_paced:
            least = self._least_frames()
            if self._played.frames < least and not self._played.is_full:
                self._note(self._look())
            return self._played.frames >= least or self._played.is_full
        settings = self._settings
        due = self._due_episodes(step)
        allowed = due + max(settings.episodes_per_round, settings.workers) if due else 0
        told = allowed if self._trainer.session.group.is_main else None
        if self._played.episodes < due or self._allowed != told:
            self._note(ray.get(self._replay.allow.remote(told)))
            self._allowed = told
        return self._played.episodes >= due

    def _least_frames(self) -> int:
        return LEAST_BATCHES * self._place.global_batch

    def _due_episodes(self, step: int) -> int:
        return (self._settings.round_at(step) + 1) * self._settings.episodes_per_round

    def _look(self) -> Played:
        """Ask how much there is: of an actor of the user's the frames alone, whose bounds nobody knows."""
        if self._is_ours:
            found: Played = ray.get(self._replay.counts.remote())
            return found
        return replace(self._played, frames=int(ray.get(self._replay.size.remote())))

    def _described(self, step: int) -> str:
        if self._is_paced:
            return f"{self._played.episodes} of the {self._due_episodes(step)} episodes that step {step} needs"
        return f"{self._played.frames} of the {self._least_frames()} frames that training begins with"

    def _note(self, played: Played) -> None:
        self._played = played
        if self._place.rank == 0:
            self.env_steps = played.env_steps
            for trouble in played.troubles if not self._said else ():
                log.warning("%s", trouble)
            self._said = True

    def size(self) -> int:
        """Return how many frames there are."""
        return self._played.frames

    def sample(self, batch_size: int, **how: Any) -> Rows:
        """Return rows; several batches come in one message, asked for before they are needed."""
        if not self._is_ours:
            return _as_rows(ray.get(self._replay.sample.remote(batch_size=batch_size)), batch_size)
        key = fold(int(how.pop("key", 0)), int(how.pop("first", 0)))  # ranks draw rows of their own
        kind = (batch_size, repr(sorted(how.items())))
        if kind not in self._ahead:
            most = max(1, min(MOST_AHEAD, self._settings.updates_per_round // 8))
            self._ahead[kind] = DrawnAhead(self._replay, {"batch_size": batch_size, **how}, most)
        rows, played = self._ahead[kind].take(key, self._allowed if self._is_paced else None)
        if played is not None:
            self._note(played)
        return rows

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return how recent episodes went, what the buffer holds, the weights' age, and updates per simulated step."""
        played, step = self._played, self._trainer.session.progress.step
        found: dict[str, float] = {"buffer_frames": played.frames}
        if self._is_ours:
            found |= {
                "episodes": played.episodes, "env_steps": played.env_steps, "buffer_episodes": played.kept,
                "updates_per_env_step": step / max(1, played.env_steps),
            }  # fmt: skip
        steps = self._publisher.steps
        if ages := [step - steps[one.version] for one in played.recent if one.version in steps]:
            found["weights_age"] = float(np.mean(ages))
        if own := [one for one in played.recent if one.success is not None]:
            found["success"] = float(np.mean([one.success for one in own if one.success is not None]))
            found["return"] = float(np.mean([one.earned for one in own]))
        return {f"online/{name}": (float(value), 1.0) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on counting; the episodes themselves are in the replay actor's folder."""
        return {"version": self._publisher.version, "env_steps": self._played.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the versions that were published; take over what was played in the processes that train."""
        self._publisher.version = max(self._publisher.version, int(state.get("version", 0)))
        if "buffer" in state and self._is_paced and self._place.rank == 0:
            for number, episode in enumerate(saved_episodes(state["buffer"])):
                ray.get(self._replay.add.remote(episode, name=f"checkpoint-{number}"))

    def close(self) -> None:
        """Publish what came of it, if it came to its end, and let go of what was asked for ahead."""
        self._ahead.clear()
        session = getattr(getattr(self, "_trainer", None), "session", None)
        if session is not None and session.finished:
            self._publisher.publish(session, session.progress.step, is_last=True)


class ActorData(OnlineData):
    """Any data with rows of a replay actor beside it, half of each batch; what is played is the affair of others.

    Args:
        data: The demonstrations.
        source: Where the rows that were played come from.
        publish_every: Updates from one publication of weights to the next.
    """

    def __init__(self, data: Any, source: RaySource, publish_every: int = 50) -> None:
        settings = OnlineSettings("", updates_per_round=publish_every * PUBLICATIONS)
        super().__init__(data, settings, share=0.5, source=source)

    def _look_at_environment(self) -> DataSpec:
        """Expect what the demonstrations have."""
        spec = self.spec
        return DataSpec({}) if spec is None else spec

    def open(self, place: Place) -> None:
        """Get ready to serve one rank; called once before `take`."""
        self.settings = replace(self.settings, episodes_per_round=place.world)
        self.share = place.batch_size // 2 / place.batch_size
        super().open(place)

    def take(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches, and say it where the replay actor's rows do not fit the data's."""
        try:
            return super().take(step)
        except RuntimeError as error:
            raise DataError(f"the rows of replay_buffer do not fit those of the data: {one_line(error)}") from error


def beside_actors(data: Any, actors: Actors, **options: Any) -> OnlineData:
    """Return data whose online rows come from the replay actor; options are for data that says nothing of it."""
    source = RaySource(actors)
    if not isinstance(data, OnlineData):
        return ActorData(data, source, **options)
    data.source = source
    return data


class DrawnAhead:
    """Batches of one kind, asked for before they are needed: one message is under way while the last is used up.

    A message holds several batches, so that asking costs little beside the rows themselves. The first of them has the
    key that was asked for, the others keys that follow from it.

    Args:
        replay: The replay actor.
        request: What is asked for, without its key.
        most: Batches that a message holds at most: how many steps old the oldest may be when it is used.
    """

    def __init__(self, replay: Any, request: Mapping[str, Any], most: int) -> None:
        self._replay, self._request, self._most = replay, dict(request), most
        self._size = int(request["batch_size"])
        self._here: Rows = {}
        self._used = self._end = 0
        self._coming: Any = None
        self._count = 1

    def take(self, key: int, allowed: int | None) -> tuple[Rows, Played | None]:
        """Return the next batch and, where a message has just come, how much was played when it was made."""
        played = None
        if self._used == self._end:
            self._here, played = ray.get(self._coming if self._coming is not None else self._ask(key, allowed))
            self._used, self._end = 0, self._count
            size = sum(array.nbytes for array in self._here.values()) // self._end
            self._count = max(1, min(self._most, MESSAGE_BYTES // max(1, size)))
            self._coming = self._ask(fold(key, 1), allowed)
        rows = slice(self._used * self._size, (self._used + 1) * self._size)
        self._used += 1
        return {name: array[rows].copy() for name, array in self._here.items()}, played  # the store is not for writing

    def _ask(self, key: int, allowed: int | None) -> Any:
        keys = [fold(key, turn) for turn in range(self._count)]
        return self._replay.draw.remote(self._request, keys, allowed)


def _as_rows(found: Any, batch_size: int) -> Rows:
    """Return what a replay actor of the user's gave as arrays by name."""
    try:
        items = dict(found.items())
    except (AttributeError, TypeError):
        raise DataError(f"replay_buffer.sample gave a {type(found).__name__}; it must give arrays by name") from None
    rows = {
        name: value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        for name, value in items.items()
    }
    short = [name for name, value in rows.items() if not value.ndim or len(value) != batch_size]
    if short or not rows:
        raise DataError(f"replay_buffer.sample(batch_size={batch_size}) gave {short or 'nothing'} of another length")
    return rows
