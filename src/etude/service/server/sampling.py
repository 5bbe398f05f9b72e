"""The thread that samples: requests for the same weights side by side, from copies that training never touches."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from etude.errors import CheckpointError, EtudeError, one_line
from etude.policies.base import evaluating
from etude.policies.language.sampling import Sampling
from etude.policies.language.targets import target_log_probs
from etude.service.server.codec import Drawn, sample_bytes
from etude.service.server.trained import load_weights
from etude.service.server.worker import Worker, log

if TYPE_CHECKING:
    from etude.service.server.service import Service

NOTHING: Final = -99999.0
"""The log-probability that stands where there is none among the likeliest."""
MAX_ROWS: Final = 64
GATHER_S: Final = 0.03
"""How long the first of several requests waits for the others: alone it would make them wait for all of its own."""
_TOGETHER: Final = ("n", "max_tokens", "temperature", "top_k", "top_p", "stop_texts", "stop_tokens", "ends")
"""What requests must have in common to be drawn side by side."""


class SamplingWorker(Worker):
    """Draws what sampling sessions ask for, each from its own weights."""

    name = "sampling"
    waiting = "kind='sample'"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._policies: dict[Any, tuple[Any, str | None]] = {}
        """A policy for each form of weights, and the file whose weights it has."""
        self.others: dict[str, Callable[[], bool]] = {}
        """What else this thread does, by the names that it is noticed by."""

    def _serve(self, target: str) -> bool:
        """Draw for the oldest request of a session and those that go with it; tell whether there was one."""
        if target in self.others:
            return self.others[target]()
        store, name, started_s = self._service.store, target, time.perf_counter()
        query = "SELECT * FROM requests WHERE target=? AND kind='sample' AND state='pending' ORDER BY number LIMIT ?"
        if store.find(query, name, 1) is not None:
            time.sleep(GATHER_S)
        waiting = store.all(query, name, MAX_ROWS)
        if not waiting:
            return False
        asked = [json.loads(row["payload"]) for row in waiting]
        together = [
            at for at, one in enumerate(asked) if all(one[key] == asked[0][key] for key in _TOGETHER)
        ][: max(1, MAX_ROWS // asked[0]["n"])]  # fmt: skip
        rows, given = [waiting[at] for at in together], [asked[at] for at in together]
        results: list[bytes] = []
        error, category = None, "user"
        try:
            policy = self.policy(store.one("SELECT * FROM samplers WHERE id=?", name))
            results = self._draw(policy, given)
        except EtudeError as found:
            error = str(found)
        except Exception as found:  # noqa: BLE001 - told to the client as its result
            log.exception("sampling for %s failed", name)
            error, category = f"the service failed: {type(found).__name__}: {one_line(found)}", "server"
        self._finish(rows, results, error, category)
        spent_s = time.perf_counter() - started_s
        self._service.counts.busy_s["sampling"] += spent_s
        log.info("%s samples for %s in %.3f s", len(rows), name, spent_s)
        return True

    def _finish(self, rows: list[sqlite3.Row], results: list[bytes], error: str | None, category: str) -> None:
        store = self._service.store
        with store.writing() as db:
            for at, row in enumerate(rows):
                still = db.execute("SELECT state FROM requests WHERE id=?", (row["id"],)).fetchone()["state"]
                if still == "pending":  # it may have been cancelled meanwhile
                    result = None if error else results[at]
                    store.finish(db, row["id"], result=result, error=error, category=category)
        self._service.tell([name for row in rows for name in (row["id"], row["target"])])

    def policy(self, sampler: Mapping[str, Any] | sqlite3.Row) -> Any:
        """Return a policy with a session's weights: the one for their form, the weights read if it has others.

        It is for the thread that samples alone.
        """
        adapter, file = self._service.adapter_of(sampler), sampler["file"]
        form = sampler["base"], None if adapter is None else adapter.form
        if form not in self._policies:
            policy = self._service.bases.make(sampler["base"], adapter)
            policy.max_rows = MAX_ROWS
            self._policies[form] = policy, None
        policy, present = self._policies[form]
        if file is not None and file != present:
            if file == "gone":
                raise CheckpointError("these weights were kept for a while only, and newer ones took their place")
            self._policies[form] = policy, None
            load_weights(policy, self._service.store.read_weights(file))
            self._policies[form] = policy, file
        return policy

    def _draw(self, policy: Any, given: list[dict[str, Any]]) -> list[bytes]:
        first = given[0]
        drawn: list[list[Any]] = [[] for _ in given]
        if first["max_tokens"]:
            sampling = Sampling(
                max_new_tokens=first["max_tokens"], temperature=first["temperature"], top_p=first["top_p"],
                top_k=first["top_k"], stop=tuple(first["stop_texts"]), stop_tokens=tuple(first["stop_tokens"]),
                ends=first["ends"],
            )  # fmt: skip
            keys = [one["seed"] for one in given]  # as a policy here draws with the same keys
            drawn = policy.generate([one["prompt"] for one in given], sampling, n=first["n"], keys=keys)
            self._service.counts.drawn_tokens += sum(len(one.tokens) for group in drawn for one in group)
        with torch.inference_mode(), evaluating(policy):
            return [_result(policy, one, group) for one, group in zip(given, drawn, strict=True)]


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
