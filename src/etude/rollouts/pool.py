"""A pool: where rollouts wait until there are enough of them to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from etude.errors import ConfigError, DataError
from etude.rollouts.plain import from_plain, to_plain
from etude.types.trajectory import Trajectory

Ready = Literal["batch_size_reached", "loaded_batch_finished", "batch_size_reached_and_loaded_batch_finished"]
_READY = ("batch_size_reached", "loaded_batch_finished", "batch_size_reached_and_loaded_batch_finished")
Order = tuple[int, ...]


class TrajectoryPool:
    """Keeps trajectories until a batch of them is ready: one by one, in groups, or in groups of groups.

    Without keys every trajectory is on its own. With one, those that agree in it form a group, which is handed out as a
    whole once it has `group_size` trajectories. With several, groups agree in all keys, and those that agree in the
    first ones are handed out side by side.

    Args:
        batch_size: Trajectories of a batch, over all ranks. Of groups, whole ones are taken until there are as many.
        group_size: Trajectories of a whole group.
        key_list: Fields that tell groups apart, such as `group_id` or `[task_id, run_id]`.
        ready: When a batch is ready. `batch_size_reached`: there are `batch_size`; the rest waits.
            `loaded_batch_finished`: nothing is under way; all that is whole is taken.
            `batch_size_reached_and_loaded_batch_finished`: both; all that is whole is taken.
    """

    gather: Callable[[Any], list[Any]] = staticmethod(lambda value: [value])
    """Returns the plain value of every rank, in order; ranks that share a pool ask it together."""

    def __init__(
        self,
        batch_size: int,
        group_size: int = 1,
        key_list: Sequence[str] = (),
        ready: Ready = "batch_size_reached",
    ) -> None:
        if batch_size < 1 or group_size < 1:
            raise ConfigError(f"a pool's batch_size and group_size must be at least 1, got {batch_size}, {group_size}")
        if ready not in _READY:
            raise ConfigError(f"a pool is ready by one of {', '.join(_READY)}; got {ready!r}")
        if isinstance(key_list, str):
            raise ConfigError(f"a pool's key_list is a list of names, got {key_list!r}")
        if group_size > 1 and not key_list:
            raise ConfigError("a pool with a group_size needs a key_list that tells groups apart, such as [group_id]")
        self.batch_size, self.group_size, self.key_list, self.ready = batch_size, group_size, tuple(key_list), ready
        self._groups: dict[tuple[Any, ...], list[tuple[Order, Trajectory]]] = {}
        self._closed: set[tuple[Any, ...]] = set()
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def put_trajectory(self, trajectory: Trajectory, order: Order | None = None) -> Literal["success"]:
        """Add a trajectory.

        Args:
            trajectory: It has the fields that groups are told apart by.
            order: Where it comes in the order of all ranks' trajectories; they are counted unless given.
        """
        self._count += 1
        where = (self._count,) if order is None else tuple(order)
        self._groups.setdefault(self._name(trajectory) or where, []).append((where, trajectory))
        return "success"

    def _name(self, trajectory: Trajectory) -> tuple[Any, ...]:
        missing = next((key for key in self.key_list if key not in trajectory), None)
        if missing is not None:
            raise DataError(f"the pool groups by {missing!r}, which a trajectory lacks; it has {trajectory.keys()}")
        return tuple(trajectory[key] for key in self.key_list)

    def close_groups(self, trajectories: Sequence[Trajectory]) -> None:
        """Take the groups of some trajectories as whole: no more of them will come."""
        self._closed |= {self._name(trajectory) for trajectory in trajectories} & self._groups.keys()

    def get_trajectories(self, *, finished: bool = False) -> list[Trajectory]:
        """Take this rank's part of a batch out of the pool; nothing unless one is ready.

        Args:
            finished: Nothing is under way that could still be put.
        """
        whole = self._whole()
        own = [(min(order for order, _ in self._groups[name]), len(self._groups[name])) for name in whole]
        everyone = sorted((tuple(order), size) for rank in self.gather(own) for order, size in rank)
        total = sum(size for _, size in everyone)
        needs_size = self.ready != "loaded_batch_finished"
        if not total or (needs_size and total < self.batch_size):
            return []
        if self.ready != "batch_size_reached" and not finished:
            return []
        most = self.batch_size if self.ready == "batch_size_reached" else total
        chosen, taken = set(), 0
        for order, size in everyone:
            if taken >= most:
                break
            chosen.add(order)
            taken += size
        names = [name for name, (order, _) in zip(whole, own, strict=True) if order in chosen]
        self._closed -= set(names)
        return [trajectory for name in self._nested(names) for _, trajectory in self._groups.pop(name)]

    def is_ready(self, *, finished: bool = False) -> bool:
        """Tell whether `get_trajectories` would return a batch, over all ranks."""
        own = sum(len(self._groups[name]) for name in self._whole())
        total = sum(self.gather(own))
        enough = total >= self.batch_size or (self.ready == "loaded_batch_finished" and total > 0)
        return enough and (finished or self.ready == "batch_size_reached")

    def _whole(self) -> list[tuple[Any, ...]]:
        size = self.group_size if self.key_list else 1
        return [name for name, group in self._groups.items() if len(group) >= size or name in self._closed]

    def _nested(self, names: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return groups in order, those that agree in their first keys side by side."""
        first: dict[tuple[Any, ...], int] = {}
        for at, name in enumerate(names):
            for depth in range(len(self.key_list)):
                first.setdefault(name[: depth + 1], at)
        if not self.key_list:
            return list(names)
        return sorted(names, key=lambda name: [first[name[: depth + 1]] for depth in range(len(name))])

    # ---- across a kill -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what waits, of all ranks together; ranks call together."""
        own = [
            [list(order), to_plain(trajectory), name in self._closed]
            for name, group in self._groups.items()
            for order, trajectory in group
        ]
        return {"waiting": [item for rank in self.gather(own) for item in rank], "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any], *, is_own: Callable[[Trajectory], bool] | None = None) -> None:
        """Take up what waited.

        Args:
            state: What `state_dict` returned.
            is_own: Whether a trajectory is this rank's; all of them are unless given.
        """
        self._groups, self._closed = {}, set()
        for order, kept, closed in sorted(state["waiting"], key=lambda item: tuple(item[0])):
            trajectory = from_plain(kept)
            if is_own is None or is_own(trajectory):
                self.put_trajectory(trajectory, tuple(order))
                if closed:
                    self._closed.add(self._name(trajectory))
        self._count = state["count"]
