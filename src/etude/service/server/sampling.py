"""The thread that samples: requests for the same weights side by side, from copies that training never touches.

A request joins those that are being drawn, and is answered when it is done, whatever the others still have before them.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from etude.errors import CheckpointError, EtudeError
from etude.policies.language.generation import WantedText
from etude.policies.language.sampling import Completion, Sampling
from etude.policies.language.targets import target_log_probs
from etude.service.server.codec import Drawn, sample_bytes
from etude.service.server.trained import load_weights
from etude.service.server.worker import Worker, explain, log

if TYPE_CHECKING:
    from etude.service.server.service import Service

NOTHING: Final = -99999.0
"""The log-probability that stands where there is none among the likeliest."""
MAX_ROWS: Final = 64
MAX_PLACES: Final = 1 << 15
"""Tokens that completions drawn side by side may have in all, prompts included: 1.5 GB of SmolLM2's memory of them."""
GATHER_S: Final = 0.005
"""How long the first of several requests waits for the others: prompts that are read together cost less."""
KEEP_COPIES_S: Final = 300.0
"""How long weights that were laid out for drawing are kept after they were asked for: 538 MB, or 1.1 GB, of SmolLM2."""
_TOGETHER: Final = ("temperature", "top_k", "top_p", "stop_texts", "stop_tokens", "ends")
"""What requests must have in common to be drawn side by side."""
_PENDING: Final = "SELECT * FROM requests WHERE target=? AND kind='sample' AND state='pending' ORDER BY number"


class SamplingWorker(Worker):
    """Draws what sampling sessions ask for, each from its own weights."""

    name = "sampling"
    waiting = "kind='sample'"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._policies: dict[Any, tuple[Any, str | None]] = {}
        """A policy for each form of weights, and the file whose weights it has."""
        self._drawn_s = time.monotonic()
        """When somebody last drew."""
        self.others: dict[str, Callable[[], bool]] = {}
        """What else this thread does, by the names that it is noticed by."""

    def _overdue(self) -> list[str]:
        """Drop copies of weights that nobody has drawn with for a while; name nothing to look at."""
        if time.monotonic() - self._drawn_s > KEEP_COPIES_S:
            for policy, _ in self._policies.values():
                policy.decoders.forget()
        return []

    def _serve(self, target: str) -> bool:
        """Draw for the oldest request of a session and those that go with it; tell whether there was one."""
        if target in self.others:
            return self.others[target]()
        service, started_s = self._service, time.perf_counter()
        if service.store.find(f"{_PENDING} LIMIT 1", target) is None:
            return False
        time.sleep(GATHER_S)
        session = _Asking(service, target)
        try:
            session.draw(self.policy(service.store.one("SELECT * FROM samplers WHERE id=?", target)))
        except EtudeError as found:
            session.fail(str(found), "user")
        except Exception as found:  # noqa: BLE001 - told to the client as its result
            session.fail(explain(found, "sampling for %s failed", target), "server")
        spent_s = time.perf_counter() - started_s
        service.counts.busy_s["sampling"] += spent_s
        log.info("%s samples for %s in %.3f s", session.count, target, spent_s)
        return True

    def policy(self, sampler: Mapping[str, Any] | sqlite3.Row) -> Any:
        """Return a policy with a session's weights: the one for their form, the weights read if it has others.

        It is for the thread that samples alone.
        """
        self._drawn_s = time.monotonic()
        adapter, file = self._service.adapter_of(sampler), sampler["file"]
        form = sampler["base"], None if adapter is None else adapter.form
        if form not in self._policies:
            policy = self._service.bases.make(sampler["base"], adapter)
            policy.max_rows, policy.max_places = MAX_ROWS, MAX_PLACES
            policy.decoders.keeps = True
            self._policies[form] = policy, None
        for other, (one, _) in self._policies.items():
            if other != form:
                one.decoders.forget()  # laid out, weights are copies: those of one policy at a time
        policy, present = self._policies[form]
        if file is not None and file != present:
            if file == "gone":
                raise CheckpointError("these weights were kept for a while only, and newer ones took their place")
            self._policies[form] = policy, None
            policy.decoders.forget()
            load_weights(policy, self._service.store.read_weights(file))
            self._policies[form] = policy, file
        return policy


@dataclass
class _OpenRequest:
    """A request that is being drawn."""

    row: sqlite3.Row
    given: dict[str, Any]
    drawn: list[Any]
    """Its completions, None where one is still to come."""


class _Asking:
    """What a sampling session asks for: its oldest request, and those after it that go with it."""

    top = 0

    def __init__(self, service: Service, target: str) -> None:
        self._service, self._target = service, target
        self._open: dict[str, _OpenRequest] = {}
        self._done: list[_OpenRequest] = []
        self._has_more = True
        """Whether requests may wait that were not looked at."""
        self.count = 0
        """Requests that were answered."""

    def draw(self, policy: Any) -> None:
        """Draw until nothing is left that goes with the oldest request."""
        oldest = self._service.store.find(f"{_PENDING} LIMIT 1", self._target)
        if oldest is None:  # it was cancelled
            return
        self._policy, self._first = policy, json.loads(oldest["payload"])
        first = self._first
        sampling = Sampling(
            temperature=first["temperature"], top_p=first["top_p"], top_k=first["top_k"],
            stop=tuple(first["stop_texts"]), stop_tokens=tuple(first["stop_tokens"]), ends=first["ends"],
        )  # fmt: skip
        policy.draw(self, sampling)

    def take(self, rows: int) -> list[WantedText]:
        """Answer what is done, and return what is to be drawn from now on."""
        self._answer()
        worker, is_new = self._service.sampling, not self.count and not self._open
        self._has_more = worker.heed(self._target) or self._has_more
        if not self._has_more or (worker.is_wanted and not is_new):
            return []  # others wait for their turn
        self._has_more = False
        found: list[WantedText] = []
        for row in self._service.store.all(f"{_PENDING} LIMIT ?", self._target, MAX_ROWS + len(self._open)):
            if row["id"] in self._open:
                continue
            given = json.loads(row["payload"])
            count = given["n"] if given["max_tokens"] else 0
            if any(given[key] != self._first[key] for key in _TOGETHER):
                break  # it is drawn next
            if len(found) + count > rows and not (is_new and not found):
                self._has_more = True
                break
            self._open[row["id"]] = asked = _OpenRequest(row, given, [None] * count)
            if not count:
                self._close(asked)
            # The seed is the key, as a policy here draws with the same one.
            places = ((row["id"], index) for index in range(count))
            found += [WantedText(given["prompt"], given["seed"], at[1], given["max_tokens"], at) for at in places]
        self._answer()
        return found

    def hear(self, place: Any, token: int, logprob: float, top: list[tuple[int, float]]) -> bool:
        """Count a token."""
        self._service.counts.drawn_tokens += 1
        return True

    def finish(self, place: Any, completion: Completion) -> None:
        """Keep a completion; a request whose last one it is is answered before another token is drawn."""
        asked = self._open[place[0]]
        asked.drawn[place[1]] = completion
        if None not in asked.drawn:
            self._close(asked)

    def fail(self, error: str, category: str) -> None:
        """Answer what is being drawn, or if nothing is the oldest request, with what went wrong."""
        left = [*self._done, *self._open.values()]
        if not left and (oldest := self._service.store.find(f"{_PENDING} LIMIT 1", self._target)) is not None:
            left = [_OpenRequest(oldest, {}, [])]
        self._tell(left, [None] * len(left), error, category)

    def _close(self, asked: _OpenRequest) -> None:
        self._done.append(self._open.pop(asked.row["id"]))

    def _answer(self) -> None:
        if self._done:
            self._tell(self._done, [_result(self._policy, asked.given, asked.drawn) for asked in self._done])
            self._done = []

    def _tell(
        self,
        done: list[_OpenRequest],
        results: Sequence[bytes | None],
        error: str | None = None,
        category: str = "user",
    ) -> None:
        store = self._service.store
        with store.writing() as db:
            for asked, result in zip(done, results, strict=True):
                name = asked.row["id"]
                still = db.execute("SELECT state FROM requests WHERE id=?", (name,)).fetchone()["state"]
                if still == "pending":  # it may have been cancelled meanwhile
                    store.finish(db, name, result=result, error=error, category=category)
        self._service.tell([name for asked in done for name in (asked.row["id"], asked.row["target"])])
        self.count += len(done)


def _result(policy: Any, given: dict[str, Any], completions: list[Any]) -> bytes:
    prompt, top_sample = given["prompt"], given["top_sample"]
    drawn = []
    for one in completions:
        top = None
        if top_sample:
            top = tuple(part[len(prompt) :] for part in likeliest(policy, [*prompt, *one.tokens], top_sample))
        drawn.append(Drawn(one.tokens, one.logprobs, one.finish_reason == "stop", top))  # type: ignore[arg-type]
    if not completions:
        drawn = [Drawn([], [], False) for _ in range(given["n"])]
    heard = _heard(policy, prompt, given["last_n"]) if given["prompt_logprobs"] else None
    top_prompt = likeliest(policy, prompt, given["top_prompt"], given["last_n"]) if given["top_prompt"] else None
    return sample_bytes(drawn, heard, top_prompt)


def _heard(policy: Any, prompt: list[int], last: int | None) -> list[float]:
    """Return the log-probability of each token of a prompt given those before it; NaN where none is asked."""
    if len(prompt) < 2:
        return [float("nan")] * len(prompt)
    found = target_log_probs(policy, [prompt[:-1]], [torch.tensor(prompt[1:])])[0].tolist()
    first = 1 if last is None else max(1, len(prompt) - last)
    return [float("nan")] * first + found[first - 1 :]


def likeliest(policy: Any, tokens: list[int], most: int, last: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens at each place of a text and their log-probabilities, (tokens, most)."""
    ids, log_probs = np.zeros((len(tokens), most), np.int32), np.full((len(tokens), most), NOTHING, np.float32)
    if len(tokens) > 1:
        logits = policy.logits({"input_ids": torch.tensor([tokens], device=policy.device)})[0, 1:]
        values, found = logits.log_softmax(-1).topk(min(most, logits.shape[-1]), -1)
        first = 1 if last is None else max(1, len(tokens) - last)
        ids[first:, : found.shape[1]] = found[first - 1 :].cpu().numpy()
        log_probs[first:, : found.shape[1]] = values[first - 1 :].cpu().numpy()
    return ids, log_probs
