"""The replay buffer as an actor: episodes come from whoever acts and go to whoever trains.

An episode is written to the run's folder before it is acknowledged. Started again after it was killed, the actor has
every one of them: none that was acknowledged is lost, and one that is sent again is the same one.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
from numpy.typing import NDArray
from safetensors import SafetensorError

from etude.data.replay import REWARD, ReplayBuffer
from etude.errors import one_line
from etude.rollouts.playing import Episode
from etude.rollouts.rounds import pack, unpack
from etude.runs.durable import remove_leftovers, write_atomically

NAME = "replay_buffer"
NOTE = "note"
"""What the actor writes down beside the rows of an episode."""
RECENT = 20
"""Episodes over which success and the age of weights are averaged."""
MOST_NAMES = 1000
"""Names that are remembered of episodes that were not kept or have left."""
Array = NDArray[Any]


@dataclass(frozen=True)
class EpisodeFacts:
    """What is known about an episode beside its rows."""

    steps: int = 0
    success: float | None = None
    """Whether it succeeded; None where that says nothing about the policy, since an expert took part."""
    earned: float = 0.0
    version: int = 0
    """The version of the weights that played it."""


@dataclass(frozen=True)
class Played:
    """How much was played, also of what was not kept or has left, and how much is held."""

    episodes: int = 0
    env_steps: int = 0
    begun: int = 0
    """How many episodes were begun: the number of the next."""
    recent: tuple[EpisodeFacts, ...] = ()
    """The newest episodes."""
    frames: int = 0
    kept: int = 0
    is_full: bool = False
    """Whether some had to leave, so that waiting brings no more frames."""
    troubles: tuple[str, ...] = ()
    """Episodes on disk that could not be read."""


class ReplayActor:
    """A replay buffer that lives in a process of its own and keeps its episodes on disk.

    Args:
        folder: Where episodes are kept; None keeps them in memory alone, and a killed actor comes back empty.
        max_frames: Frames that are held; the oldest episodes leave first.
        max_bytes: Bytes that are held.
        sampling: Whether rows are drawn alike, or episodes by their priority.
        allowed: Episodes that rollout workers may play before a trainer says how many; None is without end.
    """

    def __init__(
        self, folder: str | None = None, max_frames: int = 1_000_000, max_bytes: int = 2 * 2**30,
        sampling: Literal["uniform", "prioritised"] = "uniform", allowed: int | None = None,
    ) -> None:  # fmt: skip
        self._buffer = ReplayBuffer(max_frames, max_bytes, sampling)
        self._folder = None if folder is None else Path(folder)
        self._files: deque[Path] = deque()
        self._known: dict[str, int] = {}
        self._count = Played()
        self._recent: deque[EpisodeFacts] = deque(maxlen=RECENT)
        self._claims: dict[int, int] = {}
        self._allowed = allowed
        self._next_file = 0
        self._room: dict[str, Array] = {}
        """What was drawn last; memory that is new to a process takes four times as long to write to."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._folder)
            self._restore(self._folder)

    # -- the document's calls ----------------------------------------------------------------------------------------

    def add(
        self, episode: Mapping[str, Any] | None, *, priority: float = 1.0, name: str | None = None,
        facts: EpisodeFacts | None = None, worker: int | None = None,
    ) -> int:  # fmt: skip
        """Take an episode, and return how many there were before it. One that has come before is not taken again.

        Args:
            episode: Its rows by name; None for one that is only counted.
            priority: How likely it is drawn, where sampling goes by that.
            name: What tells it from others; the call's own unless given, so that a call which Ray repeats counts once.
            facts: How it went; read from its rows unless given.
            worker: Whose claim it was.
        """
        name = name or _name_of_call()
        if name in self._known:
            return self._known[name]
        if worker is not None:
            self._claims.pop(worker, None)
        episode = None if episode is None else plain_episode(episode)
        facts = facts or _facts_of(episode or {})
        before = self._count
        self._count = replace(
            before, episodes=before.episodes + 1, env_steps=before.env_steps + facts.steps,
            begun=max(before.begun, before.episodes + 1),
        )  # fmt: skip
        try:
            if episode is not None:
                self._buffer.add(episode, priority=priority)  # refuses what does not fit, before anything is written
                self._write(episode, {"name": name, "priority": priority, "facts": asdict(facts)})
        except BaseException:
            self._count = before
            raise
        self._recent.append(facts)
        self._known[name] = before.episodes
        while len(self._known) > MOST_NAMES + self._buffer.episodes:
            del self._known[next(iter(self._known))]
        return before.episodes

    def size(self) -> int:
        """Return how many frames there are."""
        return self._buffer.size()

    def sample(self, batch_size: int, **how: Any) -> dict[str, Array]:
        """Return a batch of rows; see `ReplayBuffer.sample`."""
        return dict(self._buffer.sample(batch_size, **how))

    # -- what our own trainer and rollouts ask -------------------------------------------------------------------------

    def draw(
        self, request: Mapping[str, Any], keys: Sequence[int], allowed: int | None = None
    ) -> tuple[dict[str, Array], Played]:
        """Return batches, one after the other, with how much there is; see `ReplayBuffer.sample_many` and `allow`.

        The next draw writes over them: Ray has sent them by then.
        """
        return self._buffer.sample_many(keys, **request, room=self._room), self.allow(allowed)

    def claim(self, worker: int) -> int:
        """Return the number of the episode that a rollout worker is to play, or -1 while there are enough."""
        self._claims.pop(worker, None)  # of one that was lost
        if self._allowed is not None and self._count.episodes + len(self._claims) >= self._allowed:
            return -1
        number = self._claims[worker] = self._count.begun
        self._count = replace(self._count, begun=number + 1)
        return number

    def allow(self, episodes: int | None) -> Played:
        """Let rollout workers play until there were so many episodes, unless None; return how much there is."""
        self._allowed = self._allowed if episodes is None else episodes
        return self.counts()

    def counts(self) -> Played:
        """Return how much was played, and how much is held."""
        buffer = self._buffer
        return replace(
            self._count, recent=tuple(self._recent), frames=buffer.size(), kept=buffer.episodes,
            is_full=buffer.added > buffer.size(),
        )  # fmt: skip

    def most_frames(self) -> int:
        """Return how many frames it holds at most."""
        return self._buffer.max_frames

    # -- episodes on disk ----------------------------------------------------------------------------------------------

    def _write(self, episode: Mapping[str, Any], note: dict[str, Any]) -> None:
        """Write an episode down, and let go of those that have left the buffer."""
        if self._folder is None:
            return
        count = self._count
        note["count"] = {"episodes": count.episodes, "env_steps": count.env_steps, "begun": count.begun}
        path = self._folder / f"{self._next_file:09d}.safetensors"
        write_atomically(path, pack([{**episode, NOTE: note}]))
        self._files.append(path)
        self._next_file += 1
        while len(self._files) > self._buffer.episodes:
            self._files.popleft().unlink(missing_ok=True)

    def _restore(self, folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            self._next_file = int(path.stem) + 1
            try:
                (episode,) = unpack(path.read_bytes())
                note = episode.pop(NOTE)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                trouble = f"{path} cannot be read and is left out: {one_line(error)}"
                self._count = replace(self._count, troubles=(*self._count.troubles, trouble))
                continue
            self._files.append(path)
            self._buffer.add(episode, priority=note["priority"])
            self._known[note["name"]] = note["count"]["episodes"] - 1
            self._recent.append(EpisodeFacts(**note["facts"]))
            self._count = replace(self._count, **note["count"])


def _name_of_call() -> str:
    """Return what tells this call from all others; one that Ray makes again has the same."""
    called = ray.get_runtime_context().get_task_id() if ray.is_initialized() else None
    return called or uuid.uuid4().hex


def plain_episode(episode: Mapping[str, Any]) -> Episode:
    """Return an episode as arrays and plain values, whatever it was given as."""
    found: Episode = {}
    for name, value in episode.items():
        if isinstance(value, Mapping):
            found[name] = {inner: np.asarray(one) for inner, one in value.items()}
        else:
            array = np.asarray(value)
            found[name] = array if array.ndim else array.item()
    return found


def _facts_of(episode: Mapping[str, Any]) -> EpisodeFacts:
    steps = next((len(value) for value in episode.values() if getattr(value, "ndim", 0)), 0)
    success = float(bool(episode["success"])) if "success" in episode else None
    return EpisodeFacts(steps, success, float(np.sum(episode.get(REWARD, 0.0))))
