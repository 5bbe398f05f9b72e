"""Results, when they are there: one at a time or many, waited for as long as a client waits for an answer."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from etude.service.server import bodies
from etude.service.server.access import PROTOBUF
from etude.service.server.codec import sample_json, training_json
from etude.service.server.service import Service
from etude.service.server.who import Owner, Served

CLONE = 1_000_000_000
"""Clients that share a sampling session count their requests in blocks of so many."""
_AS_JSON = {"sample": sample_json, "forward": training_json, "forward_backward": training_json}


def futures_router() -> APIRouter:
    """Return the calls that fetch results."""
    router = APIRouter()

    @router.post("/retrieve_future")
    async def retrieve_future(body: bodies.Retrieve, request: Request, service: Served, owner: Owner) -> Response:
        deadline_s = time.monotonic() + service.limits.poll_s
        with service.listening(body.request_id) as event:
            row = await run_in_threadpool(service.request, body.request_id, owner)
            while row["state"] == "pending" and not service.is_ending and await _set_before(event, deadline_s):
                row = await run_in_threadpool(service.request, body.request_id, owner)
        if row["state"] != "pending":
            return answer(row, request.headers.get("accept", ""))
        again = {"type": "try_again", "request_id": row["id"], "queue_state": "active"}
        return JSONResponse(again, 408)

    @router.post("/retrieve_futures")
    async def retrieve_futures(body: bodies.RetrieveMany, service: Served, owner: Owner) -> dict[str, Any]:
        deadline_s = time.monotonic() + min(service.limits.poll_s, body.timeout or service.limits.poll_s)
        await run_in_threadpool(service.owned, "samplers", body.target.sampling_session_id, owner)
        with service.listening(body.target.sampling_session_id) as event:
            rows = await run_in_threadpool(_finished, service, body)
            while not rows and not service.is_ending and await _set_before(event, deadline_s):
                rows = await run_in_threadpool(_finished, service, body)
        completions = [
            {"state": "finished", "request_id": row["id"], "response_payload_uncompressed_size": len(row["result"])}
            if row["result"] is not None
            else {"state": "failed", "request_id": row["id"]}
            for row in rows
        ]
        cursor = max((int(row["finish"]) for row in rows), default=body.prev_cursor)
        return {"completions": completions, "cursor": cursor}

    @router.post("/cancel_future")
    def cancel_future(body: bodies.Cancel, service: Served, owner: Owner) -> dict[str, Any]:
        service.cancel(body.request_id, owner)
        return {}

    return router


async def _set_before(event: asyncio.Event, deadline_s: float) -> bool:
    """Wait for an event, and tell whether it came in time."""
    try:
        await asyncio.wait_for(event.wait(), max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return False
    event.clear()
    return True


def _finished(service: Service, body: bodies.RetrieveMany) -> list[sqlite3.Row]:
    first = body.target.cloned_sampler_id * CLONE
    query = (
        "SELECT * FROM requests WHERE target=? AND finish>? AND seq>=? AND seq<? AND kind='sample' "
        "ORDER BY finish LIMIT 1000"
    )
    return service.store.all(query, body.target.sampling_session_id, body.prev_cursor, first, first + CLONE)


def answer(row: sqlite3.Row, accepted: str) -> Response:
    """Return what a request came to: a failure as an error that the client raises, a result in a form that it reads."""
    if row["error"] is not None:
        return JSONResponse({"error": row["error"], "category": row["category"]})
    if row["result"] is None:
        return JSONResponse({"detail": f"the result of {row['id']} was kept for a while, and is gone"}, 410)
    if row["kind"] not in _AS_JSON:
        return JSONResponse(json.loads(row["result"]))
    if PROTOBUF in accepted:
        return Response(row["result"], media_type=PROTOBUF)
    return JSONResponse(_AS_JSON[row["kind"]](row["result"]))
