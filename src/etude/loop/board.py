"""What ranks tell each other through the group's key-value store, in a number of messages that no rank count changes.

The first rank to come on a host leads it. It reads the reports of its host, of the leaders below it and of the one
above it; everyone else reads that of its leader. A fault that any rank finds is put up for all to read. So each rank
sends one message and asks for one answer each time, whether there are two ranks or a thousand.
"""

from __future__ import annotations

import json
from typing import Any

Report = dict[str, Any]

FAN_OUT = 8
"""Leaders of hosts below one leader."""
_NO_FAULT = "-"


class Board:
    """The store as one rank uses it; keys begin with what tells this run from others of the same processes."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int, host: str) -> None:
        self._store, self._prefix, self.rank, self.world = store, prefix, rank, world
        self._members_key = f"{prefix}/host/{host}"
        self._fault_key, self._ended_key = f"{prefix}/fault", f"{prefix}/ended"
        self.members: list[int] = []
        """Ranks of this host, the leader first."""
        self.children: list[int] = []
        """Leaders of the hosts below this one."""
        self.parent: int | None = None
        """The leader above this one."""

    @property
    def leads(self) -> bool:
        """Whether this rank reads for its host."""
        return self.members[:1] == [self.rank]

    def join(self, report: Report) -> None:
        """Take a place: as one of a host, or as its leader, at the next free place in the tree of leaders."""
        store = self._store
        self.publish(report)  # before anyone is told to read it
        store.compare_set(self._fault_key, "", _NO_FAULT)
        store.append(self._ended_key, ",")
        store.append(self._members_key, f"{self.rank},")
        self.members = _ranks(store.get(self._members_key))
        if self.leads:
            store.append(self._children_key(self.rank), ",")
            store.append(f"{self._prefix}/leaders", f"{self.rank},")
            leaders = _ranks(store.get(f"{self._prefix}/leaders"))
            place = leaders.index(self.rank)
            if place:
                self.parent = leaders[(place - 1) // FAN_OUT]
                store.append(self._children_key(self.parent), f"{self.rank},")

    def publish(self, report: Report) -> None:
        """Say how this rank is."""
        self._store.set(self._key(self.rank), json.dumps(report))

    def read(self) -> tuple[dict[int, Report], str | None, list[int]]:
        """Return the reports of whom this rank watches, the fault that was put up, and who has ended: one message."""
        others = sorted({*self.members, *self.children, *([] if self.parent is None else [self.parent])} - {self.rank})
        if not self.leads:
            others = self.members[:1]
        lists = [self._members_key, self._children_key(self.rank)] if self.leads else []
        keys = [self._fault_key, self._ended_key, *lists, *map(self._key, others)]
        fault, ended, *values = self._store.multi_get(keys)
        if lists:  # whoever is new is read from the next time on
            self.members, self.children = _ranks(values[0]), _ranks(values[1])
        reports = {rank: json.loads(value) for rank, value in zip(others, values[len(lists) :], strict=True)}
        return reports, None if fault.decode() == _NO_FAULT else fault.decode(), _ranks(ended)

    def read_host(self) -> dict[int, Report]:
        """Return the reports of all ranks of this host but this one: two messages, for when something goes wrong."""
        others = [rank for rank in _ranks(self._store.get(self._members_key)) if rank != self.rank]
        values = self._store.multi_get(list(map(self._key, others))) if others else []
        return {rank: json.loads(value) for rank, value in zip(others, values, strict=True)}

    def read_one(self, rank: int) -> Report:
        """Return the newest report of a rank that has made one."""
        report: Report = json.loads(self._store.get(self._key(rank)))
        return report

    def read_all(self) -> dict[int, Report]:
        """Return the reports of all ranks that have made one: a message for each, so only at the very end."""
        return {rank: self.read_one(rank) for rank in range(self.world) if self._store.check([self._key(rank)])}

    def put_up(self, fault: str) -> None:
        """Let all ranks know of a fault, unless they know of one."""
        self._store.compare_set(self._fault_key, _NO_FAULT, fault)

    def end(self) -> None:
        """Say that this rank has ended, as it should."""
        self._store.append(self._ended_key, f"{self.rank},")

    def ended(self) -> list[int]:
        """Return the ranks that have ended."""
        return _ranks(self._store.get(self._ended_key))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _children_key(self, rank: int) -> str:
        return f"{self._prefix}/below/{rank}"


def _ranks(listed: bytes) -> list[int]:
    return [int(rank) for rank in listed.decode().split(",") if rank]
