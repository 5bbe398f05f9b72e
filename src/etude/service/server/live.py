"""Completions for those who wait on the line: written down nowhere, drawn side by side where the weights are one."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from etude.errors import CheckpointError, EtudeError, one_line
from etude.policies.language.sampling import Completion, Sampling
from etude.rng import STREAM_ROLLOUT, fold
from etude.service.server.checkpoints import SCHEME, find_checkpoint
from etude.service.server.sampling import MAX_ROWS
from etude.service.server.service import Refusal, Service

log = logging.getLogger("etude.service")
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
    ends: bool = True
    """Whether the model's own end tokens end a completion."""
    top: int = 0
    """How many of the likeliest tokens to tell of."""

    def goes_with(self, other: Ask) -> bool:
        """Tell whether two can be drawn side by side."""
        alike = ("weights", "n", "temperature", "top_p", "top_k", "stops", "ends")
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
        self._lock = threading.Lock()
        service.sampling.others[LIVE] = self._serve

    @property
    def waiting(self) -> int:
        """Requests nobody has begun with."""
        return len(self._waiting)

    def submit(self, ask: Ask, hears: Hearer | None = None) -> Live:
        """Take a request; called on the event loop."""
        live = Live(ask, asyncio.get_running_loop().create_future(), hears, [[] for _ in range(ask.rows)])
        with self._lock:
            if len(self._waiting) >= self._service.limits.queue:
                raise Refusal(429, f"{len(self._waiting)} requests are waiting, which is the most; try again later")
            self._waiting.append(live)
        self._service.sampling.notice(LIVE)
        return live

    def _serve(self) -> bool:
        """Draw for the oldest request and those that go with it; tell whether more wait."""
        self._gather()
        started_s = time.perf_counter()
        batch = self._take()
        if not batch:
            return False
        try:
            drawn = self._draw(batch)
        except EtudeError as error:
            status = 404 if isinstance(error, CheckpointError) else 400
            self._tell(batch, Refusal(status, str(error)))
        except Exception as error:  # told to the clients as their result
            log.exception("drawing for %s requests failed", len(batch))
            self._tell(batch, Refusal(500, f"the service failed: {type(error).__name__}: {one_line(error)}"))
        else:
            self._tell(batch, drawn)
        spent_s = time.perf_counter() - started_s
        self._service.counts.busy_s["sampling"] += spent_s
        log.info("%s live requests of %s in %.3f s", len(batch), batch[0].ask.weights.base, spent_s)
        return bool(self._waiting)

    def _gather(self) -> None:
        """Wait as long as others come: drawn with them, a request costs a fraction."""
        seen = 0
        for _ in range(GATHERINGS):
            if len(self._waiting) == seen:
                return
            seen = len(self._waiting)
            time.sleep(GATHER_S)

    def _take(self) -> list[Live]:
        with self._lock:
            present = [live for live in self._waiting if not live.is_gone]
            batch: list[Live] = []
            rows = longest = most = 0
            for live in present:
                ask = live.ask
                width, tokens = max(longest, *map(len, ask.prompts)), max(most, ask.max_tokens)
                if batch and not (
                    ask.goes_with(batch[0].ask)
                    and rows + ask.rows <= MAX_ROWS
                    and width + tokens <= self._service.bases.context(ask.weights.base)
                ):
                    continue
                batch.append(live)
                rows, longest, most = rows + ask.rows, width, tokens
            taken = {id(live) for live in batch}
            self._waiting = deque(live for live in present if id(live) not in taken)
        return batch

    def _draw(self, batch: Sequence[Live]) -> list[list[list[Completion]]]:
        first = batch[0].ask
        policy = self._service.sampling.policy(vars(first.weights))
        sampling = Sampling(
            max(live.ask.max_tokens for live in batch), first.temperature, first.top_p, first.top_k, first.stops,
            ends=first.ends,
        )  # fmt: skip
        prompts = [prompt for live in batch for prompt in live.ask.prompts]
        # The first prompt of a request draws as a sampling session does with the same seed.
        keys = [
            fold(STREAM_ROLLOUT, live.ask.seed, *([number] if number else []))
            for live in batch
            for number in range(len(live.ask.prompts))
        ]
        drawn = policy.generate(prompts, sampling, n=first.n, keys=keys, listener=_Hub(batch))
        self._service.counts.drawn_tokens += sum(len(one.tokens) for group in drawn for one in group)
        rest = iter(drawn)
        return [[next(rest) for _ in live.ask.prompts] for live in batch]

    def _tell(self, batch: Sequence[Live], found: Sequence[list[list[Completion]]] | Refusal) -> None:
        def tell() -> None:
            for number, live in enumerate(batch):
                if live.done.done():
                    continue
                if isinstance(found, Refusal):
                    live.done.set_exception(found)
                else:
                    live.done.set_result(found[number])

        loop = self._service.loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(tell)


class _Hub:
    """Passes each token on to the request that it is for."""

    def __init__(self, batch: Sequence[Live]) -> None:
        self._owners = [(live, number) for live in batch for number in range(len(live.ask.prompts))]
        self.top = max(live.ask.top for live in batch)

    def hear(self, prompt: int, index: int, token: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Take a token; return whether its completion is to go on."""
        live, number = self._owners[prompt]
        return live.hear(number * live.ask.n + index, (token, logprob, top[: live.ask.top]))
