"""Completions for those who wait on the line: written down nowhere, drawn side by side where the weights are one.

A request joins those that are being drawn as soon as they have their next token.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from etude.errors import CheckpointError, EtudeError
from etude.policies.language.generation import WantedText
from etude.policies.language.sampling import Completion, Sampling
from etude.rng import STREAM_ROLLOUT, fold
from etude.service.server.checkpoints import SCHEME, find_checkpoint
from etude.service.server.sampling import MAX_ROWS
from etude.service.server.service import Refusal, Service
from etude.service.server.worker import explain, log

LIVE: Final = "live"
NEWEST: Final = "newest"
GATHER_S: Final = 0.004
"""A request waits so long for others to go with it, and again as long as others come."""
GATHERINGS: Final = 10
_SAVED: Final = """
SELECT base, adapter, file, created FROM checkpoints WHERE owner=?1 AND (expires IS NULL OR expires>?2)
    AND (?3 IS NULL OR model=?3)
UNION ALL SELECT base, adapter, file, created FROM samplers WHERE owner=?1 AND ephemeral=1 AND file!='gone'
    AND (?3 IS NULL OR model=?3)
ORDER BY created DESC LIMIT 1
"""


@dataclass(frozen=True)
class ServedWeights:
    """What to draw with."""

    base: str
    adapter: str | None = None
    file: str | None = None


def find_weights(service: Service, name: str, owner: str) -> ServedWeights:
    """Return the weights that a client names: a base model, a saved checkpoint, a run, or the newest of all runs."""
    if name in service.bases.names:
        return ServedWeights(name)
    found: Mapping[str, Any] | sqlite3.Row | None
    if name.startswith(SCHEME):
        try:
            found = find_checkpoint(service.store, name, owner)
        except EtudeError as error:
            raise Refusal(404, str(error)) from None
    else:
        run = None if name == NEWEST else name
        is_run = "SELECT id FROM models WHERE id=? AND owner=?"
        if run is not None and service.store.find(is_run, run, owner) is None:
            offered = ", ".join([*service.bases.names, NEWEST])
            raise Refusal(404, f"there is no model {name[:200]!r}; there are {offered}, and what /v1/models lists")
        found = service.store.find(_SAVED, owner, time.time(), run)
        if found is None:
            raise Refusal(404, f"{'no run' if run is None else run} has saved weights to draw from yet")
    return ServedWeights(found["base"], found["adapter"], found["file"])


@dataclass(frozen=True)
class Ask:
    """What is to be drawn, and how."""

    weights: ServedWeights
    prompts: list[list[int]]
    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stops: tuple[str, ...]
    seed: int
    owner: str = ""
    """Whose request it is: keys take turns."""
    ends: bool = True
    """Whether the model's own end tokens end a completion."""
    top: int = 0
    """How many of the likeliest tokens to tell of."""

    def goes_with(self, other: Ask) -> bool:
        """Tell whether two can be drawn side by side."""
        alike = ("weights", "temperature", "top_p", "top_k", "stops", "ends")
        return all(getattr(self, name) == getattr(other, name) for name in alike)

    @property
    def rows(self) -> int:
        """Completions asked for."""
        return len(self.prompts) * self.n


Told = tuple[int, float, list[tuple[int, float]]]
"""A token, its log-probability, and the likeliest ones in its place."""
Hearer = Callable[[int, Told], None]


@dataclass
class Live:
    """A request and what has come of it so far."""

    ask: Ask
    done: asyncio.Future[list[list[Completion]]]
    hears: Hearer | None = None
    """Told of each choice's tokens, on the thread that draws."""
    told: list[list[Told]] = field(default_factory=list)
    is_gone: bool = False
    """Whether nobody waits any longer."""

    def hear(self, choice: int, told: Told) -> bool:
        """Take a token; return whether more are wanted."""
        self.told[choice].append(told)
        if self.hears is not None:
            self.hears(choice, told)
        return not self.is_gone and len(self.told[choice]) < self.ask.max_tokens


class LiveDrawing:
    """Draws for requests that wait, on the thread that samples."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting: deque[Live] = deque()
        self._turns: dict[str, int] = {}
        """When each key last had a request begun, counted in turns."""
        self._lock = threading.Lock()
        self._batch: _LiveBatch | None = None
        """What is being drawn."""
        self._is_ending = False
        service.sampling.others[LIVE] = self._serve

    @property
    def waiting(self) -> int:
        """Requests nobody has begun with."""
        return len(self._waiting)

    def submit(self, ask: Ask, hears: Hearer | None = None) -> Live:
        """Take a request; called on the event loop."""
        live = Live(ask, asyncio.get_running_loop().create_future(), hears, [[] for _ in range(ask.rows)])
        if self._is_ending:
            raise Refusal(503, "the service ends; ask again when it is back")
        with self._lock:
            waiting = sum(one.ask.owner == ask.owner for one in self._waiting)
            if waiting >= self._service.limits.queue:
                raise Refusal(429, f"{waiting} requests of this key are waiting, which is the most; try again later")
            self._waiting.append(live)
        self._service.sampling.notice(LIVE)
        return live

    def end(self) -> None:
        """Send home whoever waits, and take no more: the service ends. Called on the thread of the event loop."""
        self._is_ending = True
        with self._lock:
            waiting = [*self._waiting, *(self._batch.open if self._batch is not None else ())]
        for live in waiting:
            live.is_gone = True
            _tell(self._service, live, Refusal(503, "the service ends; ask again when it is back"))

    def _serve(self) -> bool:
        """Draw for the oldest request and those that go with it; tell whether more wait."""
        self._gather()
        started_s = time.perf_counter()
        batch = self._batch = _LiveBatch(self._service, self.take)
        try:
            batch.draw()
        except EtudeError as error:
            status = 404 if isinstance(error, CheckpointError) else 400
            batch.refuse(Refusal(status, str(error)))
        except Exception as error:  # noqa: BLE001 - told to the clients as their result
            batch.refuse(Refusal(500, explain(error, "drawing for %s requests failed", batch.count)))
        if batch.count:
            spent_s = time.perf_counter() - started_s
            self._service.counts.busy_s["sampling"] += spent_s
            log.info("%s live requests in %.3f s", batch.count, spent_s)
        return bool(self._waiting)

    def _gather(self) -> None:
        """Wait as long as others come: drawn with them, a request costs a fraction."""
        seen = 0
        for _ in range(GATHERINGS):
            if len(self._waiting) == seen:
                return
            seen = len(self._waiting)
            time.sleep(GATHER_S)

    def take(self, rows: int, like: Ask | None = None) -> list[Live]:
        """Return the next requests that go with each other, and with another, and have so many rows at most.

        Keys take turns, each with its oldest request, beginning with the one whose last turn is longest ago.
        """
        with self._lock:
            present = [live for live in self._waiting if not live.is_gone]
            batch: list[Live] = []
            for live in self._in_turns(present):
                if like is not None and not (live.ask.goes_with(like) and live.ask.rows <= rows):
                    break  # it is drawn next
                like = like or live.ask
                batch.append(live)
                rows -= live.ask.rows
                self._turns[live.ask.owner] = max(self._turns.values(), default=0) + 1
            taken = set(map(id, batch))
            self._waiting = deque(live for live in present if id(live) not in taken)
        return batch

    def _in_turns(self, waiting: list[Live]) -> list[Live]:
        places: dict[str, int] = {}
        order = []
        for live in waiting:  # from the oldest
            owner = live.ask.owner
            places[owner] = places.get(owner, -1) + 1
            order.append((places[owner], self._turns.get(owner, 0), live))
        return [live for *_, live in sorted(order, key=lambda one: one[:2])]


class _LiveBatch:
    """Requests that are drawn side by side; each is answered when it is done."""

    def __init__(self, service: Service, take: Callable[[int, Ask | None], list[Live]]) -> None:
        self._service, self._take = service, take
        self.open = take(MAX_ROWS, None)
        self._new = list(self.open)
        self._drawn: dict[tuple[int, int], Completion] = {}
        self.count, self.top = len(self.open), 0

    def draw(self) -> None:
        """Draw until nothing is left that goes with the first."""
        if not self.open:
            return
        self._first = first = self.open[0].ask
        policy = self._service.sampling.policy(vars(first.weights))
        sampling = Sampling(
            temperature=first.temperature, top_p=first.top_p, top_k=first.top_k, stop=first.stops, ends=first.ends
        )
        policy.draw(self, sampling)

    def take(self, rows: int) -> list[WantedText]:
        """Return what is to be drawn from now on."""
        new, self._new = self._new, []
        worker = self._service.sampling
        worker.heed(LIVE)
        if not new and not worker.is_wanted:  # others wait for their turn
            new = self._take(rows, self._first)
            self.open += new
            self.count += len(new)
        self.top = max((live.ask.top for live in self.open), default=0)
        return [wanted for live in new for wanted in _wanted(live)]

    def hear(self, place: tuple[Live, int], token: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Pass a token on; return whether its completion is to go on."""
        live, choice = place
        self._service.counts.drawn_tokens += 1
        return live.hear(choice, (token, logprob, top[: live.ask.top]))

    def finish(self, place: tuple[Live, int], completion: Completion) -> None:
        """Keep a completion, and answer the request if it is the last one."""
        live, choice = place
        self._drawn[id(live), choice] = completion
        if all((id(live), at) in self._drawn for at in range(live.ask.rows)):
            n, drawn = live.ask.n, [self._drawn.pop((id(live), at)) for at in range(live.ask.rows)]
            self.open.remove(live)
            _tell(self._service, live, [drawn[start : start + n] for start in range(0, len(drawn), n)])

    def refuse(self, refusal: Refusal) -> None:
        """Answer all that is not drawn with what went wrong."""
        for live in self.open:
            _tell(self._service, live, refusal)


def _tell(service: Service, live: Live, found: list[list[Completion]] | Refusal) -> None:
    """Answer a request; called from any thread."""

    def tell() -> None:
        if live.done.done():
            return
        if isinstance(found, Refusal):
            live.done.set_exception(found)
            live.done.exception()  # whoever asked may have gone, and then nobody looks
        else:
            live.done.set_result(found)

    loop = service.loop
    if loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(tell)


def _wanted(live: Live) -> list[WantedText]:
    """Return the completions that a request asks for.

    Its first prompt draws as a sampling session does with the same seed.
    """
    ask = live.ask
    keys = [fold(STREAM_ROLLOUT, ask.seed, *([number] if number else [])) for number in range(len(ask.prompts))]
    return [
        WantedText(prompt, keys[number], index, ask.max_tokens, (live, number * ask.n + index))
        for number, prompt in enumerate(ask.prompts)
        for index in range(ask.n)
    ]
