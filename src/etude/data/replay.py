"""`ReplayBuffer`: whole episodes, the newest of them, cut into windows or transitions when they are drawn.

What is drawn is a function of a key and of what the buffer holds, so that a run that goes on draws what it would have.

Shape letters: B batch, T time within a window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from etude.data.order import Indices, Keys
from etude.data.windows import role_of
from etude.errors import DataError
from etude.rng import fold, fold_array

Array = NDArray[Any]
Sampling = Literal["uniform", "prioritised"]
REWARD, DISCOUNT, NEXT, LAST = "reward", "discount", "next.", "last"
MOST_INDICES = 1 << 15
"""Places that are looked up at once: 256 KB, for memory in larger pieces is new each time, and takes longer to write to
than what is drawn."""
FACTS = ("terminated", "success", "episode")
"""What an episode says once and not for each of its frames; the number under which it was played is not kept."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One episode: its rows are those from `first` on, one more than it has frames."""

    first: int
    frames: int
    priority: float
    terminated: bool
    success: bool


class ReplayBuffer:
    """The newest episodes, within bounds of frames and of bytes; the oldest leave first.

    Args:
        max_frames: Frames that it holds at most.
        max_bytes: Bytes that these take at most.
        sampling: Draw every frame alike (uniform), or those of an episode in proportion to its priority (prioritised).
    """

    def __init__(self, max_frames: int = 1_000_000, max_bytes: int = 2 * 2**30, sampling: Sampling = "uniform") -> None:
        if max_frames < 1 or max_bytes < 1:
            raise DataError(
                f"a replay buffer needs room for frames, got max_frames {max_frames}, max_bytes {max_bytes}"
            )
        if sampling not in ("uniform", "prioritised"):
            raise DataError(f"sampling must be uniform or prioritised, got {sampling!r}")
        self.max_frames, self.max_bytes, self.sampling = max_frames, max_bytes, sampling
        self.added = 0
        """Frames ever added."""
        self._drawn = 0
        self._next_number = 0
        self._clear()

    def _clear(self) -> None:
        # Rows are counted without end; row r lies at r % capacity. Memory that nobody has written to takes no room.
        self._columns: dict[str, Array] = {}
        self._capacity = 0
        self._kept: deque[_Kept] = deque()
        self._frames = self._rows = self._end = 0
        self._index: _Index | None = None

    # -- what is there -----------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return how many frames there are to draw from."""
        return self._frames

    def __len__(self) -> int:
        return self._frames

    @property
    def episodes(self) -> int:
        """How many episodes there are."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that the episodes take."""
        return self._rows * self._row_bytes

    @property
    def success(self) -> float:
        """Share of the episodes that succeeded."""
        return sum(one.success for one in self._kept) / max(1, len(self._kept))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns; none before the first episode."""
        return tuple(self._columns)

    @property
    def _row_bytes(self) -> int:
        return sum(column.dtype.itemsize * math.prod(column.shape[1:]) for column in self._columns.values())

    # -- adding ------------------------------------------------------------------------------------------------------

    def add(self, episode: Mapping[str, Any], *, priority: float = 1.0) -> int:
        """Take an episode and return its number (0, 1, 2, ...); older ones leave where there is no room.

        Args:
            episode: Rows by feature name, each (frames, ...), pictures as uint8 (channels, height, width); `reward` by
                frame; `terminated` and `success` of the whole; under `last` what was seen after the last action.
            priority: How often its frames are drawn, compared with those of others, where sampling is prioritised.
        """
        if not 0 < priority < math.inf:
            raise DataError(f"the priority of an episode is a positive number, got {priority}")
        rows = {name: np.asarray(value) for name, value in episode.items() if name not in (*FACTS, LAST)}
        rows.setdefault(REWARD, np.zeros(_length(rows), dtype=np.float32))
        frames = _length(rows)
        if not self._columns:
            self._make_columns(rows)
        self._require_alike(rows)
        if frames > self.max_frames or frames + 1 > self._capacity:
            raise DataError(
                f"an episode of {frames} frames ({(frames + 1) * self._row_bytes / 1e6:.1f} MB) is larger than the "
                f"replay buffer (max_frames {self.max_frames}, max_bytes {self.max_bytes}); make the buffer larger"
            )
        while self._frames + frames > self.max_frames or self._rows + frames + 1 > self._capacity:
            gone = self._kept.popleft()
            self._frames, self._rows = self._frames - gone.frames, self._rows - gone.frames - 1
        places = self._places(np.arange(self._end, self._end + frames + 1))
        last = episode.get(LAST) or {}
        for name, column in self._columns.items():
            column[places[:-1]] = rows[name]
            column[places[-1]] = last.get(name, rows[name][-1])
        facts = bool(episode.get("terminated", False)), bool(episode.get("success", False))
        self._kept.append(_Kept(self._end, frames, float(priority), *facts))
        self._end, self._rows, self._frames = self._end + frames + 1, self._rows + frames + 1, self._frames + frames
        self.added += frames
        self._next_number += 1
        self._index = None
        return self._next_number - 1

    def _make_columns(self, rows: Mapping[str, Array]) -> None:
        for name, values in rows.items():
            if values.dtype.kind not in "biuf":
                raise DataError(f"{name} of an episode holds {values.dtype}, and only numbers can be replayed")
        each = sum(values.dtype.itemsize * math.prod(values.shape[1:]) for values in rows.values())
        self._capacity = min(2 * self.max_frames, self.max_bytes // each)  # at most one more row for each frame
        self._columns = {
            name: np.empty((self._capacity, *values.shape[1:]), values.dtype) for name, values in rows.items()
        }

    def _require_alike(self, rows: Mapping[str, Array]) -> None:
        if rows.keys() != self._columns.keys():
            raise DataError(f"the episodes of a replay buffer have {sorted(self._columns)}; this has {sorted(rows)}")
        for name, values in rows.items():
            column = self._columns[name]
            if values.shape[1:] != column.shape[1:] or values.dtype != column.dtype:
                raise DataError(
                    f"{name} of an episode is {values.dtype} {list(values.shape[1:])}, and in the replay buffer "
                    f"{column.dtype} {list(column.shape[1:])}"
                )

    # -- drawing -----------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        *,
        key: int | None = None,
        first: int = 0,
        windows: Mapping[str, Sequence[int]] | None = None,
        transitions: bool = False,
        n_step: int = 1,
        gamma: float = 0.99,
    ) -> dict[str, Array]:
        """Draw frames, each with its window in time or as a transition.

        Args:
            batch_size: How many.
            key: Decides which, with what the buffer holds; None goes on from call to call.
            first: Place of the first in the endless row that a key stands for, so that several may share one draw.
            windows: Distances in frames by feature name, as datasets take them: such a feature comes as (B, T, ...)
                with `<name>_is_pad`, the others as (B, ...).
            transitions: Return `next.<name>` of each observation, `n_step` frames later; `reward` is then the
                discounted sum on the way, and `discount` what a value there counts, 0 where the episode was over.
            n_step: Frames of a transition; fewer where the episode ends.
            gamma: The discount of one frame.
        """
        if key is None:
            key, self._drawn = self._drawn, self._drawn + 1
        keys_B = fold_array(fold(key), np.arange(first, first + batch_size))
        return self._rows_of(keys_B, {}, windows or {}, transitions, n_step, gamma)

    def sample_many(
        self,
        keys: Sequence[int],
        batch_size: int,
        *,
        room: dict[str, Array] | None = None,
        windows: Mapping[str, Sequence[int]] | None = None,
        transitions: bool = False,
        n_step: int = 1,
        gamma: float = 0.99,
    ) -> dict[str, Array]:
        """Draw a batch for each key, as `sample` does; they lie one after the other.

        Args:
            keys: Decide which frames are drawn, batch by batch.
            batch_size: Frames of each batch.
            room: Arrays of the last draw, which are written over: the caller must be done with them.
            windows: As `sample` takes them, and what follows too.
            transitions: Whether rows come as transitions.
            n_step: Frames of a transition.
            gamma: The discount of one frame.
        """
        room, windows, total = {} if room is None else room, windows or {}, len(keys) * batch_size
        for name in [name for name, whole in room.items() if len(whole) != total]:
            del room[name]
        longest = max([1, n_step, *map(len, windows.values())])
        block, found = max(1, MOST_INDICES // (batch_size * longest)), dict[str, Array]()
        for begin in range(0, len(keys), block):
            starts = np.array([fold(key) for key in keys[begin : begin + block]], dtype=np.uint64)
            keys_B = fold_array(starts[:, None], np.arange(batch_size)).reshape(-1)
            rows = slice(begin * batch_size, (begin + len(starts)) * batch_size)
            views = {name: whole[rows] for name, whole in room.items()}
            part = self._rows_of(keys_B, dict(views), windows, transitions, n_step, gamma)
            for name, values in part.items():
                whole, shape = room.get(name), (total, *values.shape[1:])
                if whole is None or whole.shape != shape or whole.dtype != values.dtype:
                    whole = room[name] = np.empty(shape, values.dtype)
                if views.get(name) is not values:  # else it was written where it belongs
                    whole[rows] = values
                found[name] = whole
        return found

    def _rows_of(
        self, keys_B: Keys, room: dict[str, Array], windows: Mapping[str, Sequence[int]], transitions: bool,
        n_step: int, gamma: float,
    ) -> dict[str, Array]:  # fmt: skip
        if not self._frames:
            raise DataError("the replay buffer is empty; add an episode before drawing from it")
        if self._index is None:
            self._index = _Index(self._kept, self.sampling, self._capacity)
        owner_B, at_B = self._index.draw(keys_B)
        cut = _Cut(self._columns, self._capacity, self._index, owner_B, room)
        last_B = self._index.frames[owner_B] - 1
        if not transitions:
            return cut.windows(self._columns, at_B, last_B, windows)
        seen = [name for name in self._columns if name != REWARD and role_of(name) not in ("action", "task")]
        batch = cut.windows([n for n in self._columns if n != REWARD], at_B, last_B, windows)
        then_B = np.minimum(at_B + n_step, last_B + 1)
        batch |= cut.windows(seen, then_B, last_B + 1, windows, NEXT)
        wanted_BT = at_B[:, None] + np.arange(n_step)
        reward_BT = self._columns[REWARD].take(cut.places(np.minimum(wanted_BT, last_B[:, None])))
        weight_BT = np.where(wanted_BT <= last_B[:, None], gamma ** np.arange(n_step), 0.0)
        batch[REWARD] = (reward_BT * weight_BT).sum(1).astype(np.float32)
        over_B = self._index.terminated[owner_B] & (then_B > last_B)
        batch[DISCOUNT] = np.where(over_B, 0.0, gamma ** (then_B - at_B)).astype(np.float32)
        return batch

    def _places(self, rows: Indices) -> Indices:
        return rows % self._capacity

    # -- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later draws depend on, as tensors and plain values; pictures stay uint8."""
        kept = list(self._kept)
        rows = self._places(np.arange(self._end - self._rows, self._end)) if kept else np.zeros(0, np.int64)
        return {
            "columns": {name: torch.from_numpy(column.take(rows, axis=0)) for name, column in self._columns.items()},
            "frames": torch.tensor([one.frames for one in kept], dtype=torch.int64),
            "priorities": torch.tensor([one.priority for one in kept], dtype=torch.float64),
            "terminated": torch.tensor([one.terminated for one in kept], dtype=torch.bool),
            "success": torch.tensor([one.success for one in kept], dtype=torch.bool),
            "added": self.added,
            "drawn": self._drawn,
            "episodes": self._next_number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; where the bounds are narrower now, the oldest episodes are left behind."""
        self._clear()
        for episode, priority in zip(saved_episodes(state), state["priorities"].tolist(), strict=True):
            self.add(episode, priority=priority)
        self.added, self._drawn, self._next_number = int(state["added"]), int(state["drawn"]), int(state["episodes"])


def saved_episodes(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a buffer's saved state, the oldest first."""
    columns = {name: np.asarray(value) for name, value in state["columns"].items()}
    begin = 0
    for frames, terminated, success in zip(
        *(state[name].tolist() for name in ("frames", "terminated", "success")), strict=True
    ):
        rows = {name: column[begin : begin + frames] for name, column in columns.items()}
        last = {name: column[begin + frames] for name, column in columns.items()}
        yield {**rows, LAST: last, "terminated": terminated, "success": success}
        begin += frames + 1


class _Cut:
    """Cuts what was drawn out of the columns. Frames are counted within their episodes here.

    Args:
        columns: Rows of all episodes.
        capacity: Rows that there is room for.
        index: Where each episode lies.
        owner_B: The episode of each frame.
        room: Arrays that may be written over.
    """

    def __init__(
        self, columns: Mapping[str, Array], capacity: int, index: _Index, owner_B: Indices, room: dict[str, Array]
    ) -> None:
        self._columns, self._capacity, self._room = columns, capacity, room
        self._begin_B, self._goes_round = index.begin[owner_B], index.goes_round

    def places(self, at: Indices) -> Indices:
        """Return where frames lie in the columns, (B,) or (B, T)."""
        found = at + (self._begin_B if at.ndim == 1 else self._begin_B[:, None])
        if self._goes_round:  # a division for each of them would take longer than all the rest
            found -= self._capacity * (found >= self._capacity)
        return found

    def windows(
        self, names: Iterable[str], at_B: Indices, last_B: Indices, windows: Mapping[str, Sequence[int]],
        prefix: str = "",
    ) -> dict[str, Array]:  # fmt: skip
        """Return columns at frames, or in windows around them that stay within their episodes."""
        single_B = self.places(at_B)
        found: dict[tuple[int, ...], tuple[Indices, Array]] = {}
        batch: dict[str, Array] = {}
        for name in names:
            if name not in windows:
                batch[prefix + name] = self._take(name, single_B, prefix)
                continue
            steps = tuple(map(int, windows[name]))
            if steps not in found:
                wanted_BT = at_B[:, None] + np.array(steps, dtype=np.int64)
                inside_BT = np.minimum(wanted_BT, last_B[:, None])
                if min(steps, default=0) < 0:
                    np.maximum(inside_BT, 0, out=inside_BT)
                found[steps] = self.places(inside_BT), inside_BT != wanted_BT
            batch[prefix + name] = self._take(name, found[steps][0], prefix)
            batch[f"{prefix}{name}_is_pad"] = found[steps][1]
        return batch

    def _take(self, name: str, places: Indices, prefix: str) -> Array:
        column, name = self._columns[name], prefix + name
        out, shape = self._room.get(name), (*places.shape, *column.shape[1:])
        if out is None or out.shape != shape or out.dtype != column.dtype:
            out = self._room[name] = np.empty(shape, column.dtype)
        return column.take(places, axis=0, out=out, mode="clip")  # all are inside; asking again takes longer


class _Index:
    """Where each episode lies, for drawing many frames at once."""

    def __init__(self, kept: Iterable[_Kept], sampling: Sampling, capacity: int) -> None:
        episodes = list(kept)
        self.begin: Indices = np.array([one.first for one in episodes], dtype=np.int64) % capacity
        """The place of the first row of each."""
        self.frames: Indices = np.array([one.frames for one in episodes], dtype=np.int64)
        self.goes_round = bool((self.begin + self.frames >= capacity).any())
        """Whether one of them lies across the end of the columns."""
        self.terminated: Array = np.array([one.terminated for one in episodes])
        self._ends: Indices = np.cumsum(self.frames)
        self._starts: Indices = self._ends - self.frames
        self._weights: Array | None = None
        if sampling == "prioritised":
            self._priority = np.array([one.priority for one in episodes])
            self._weights = np.cumsum(self._priority * self.frames)

    def draw(self, keys_B: Keys) -> tuple[Indices, Indices]:
        """Return the episode of the frame that each key stands for, and its place among the frames of that."""
        if self._weights is None:
            frame_B = (keys_B % np.uint64(self._ends[-1])).astype(np.int64)
            owner_B = np.searchsorted(self._ends, frame_B, side="right")
            return owner_B, frame_B - self._starts[owner_B]
        place_B = (keys_B >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._weights[-1]
        owner_B = np.minimum(np.searchsorted(self._weights, place_B, side="right"), len(self.frames) - 1)
        begin_B = self._weights[owner_B] - self._priority[owner_B] * self.frames[owner_B]
        offset_B = ((place_B - begin_B) / self._priority[owner_B]).astype(np.int64)
        return owner_B, np.clip(offset_B, 0, self.frames[owner_B] - 1)


def _length(rows: Mapping[str, Array]) -> int:
    lengths = {name: len(values) if values.ndim else 0 for name, values in rows.items()}
    if not lengths or len(set(lengths.values())) > 1 or not min(lengths.values()):
        raise DataError(f"an episode has rows of one length, at least one; got {lengths}")
    return next(iter(lengths.values()))
