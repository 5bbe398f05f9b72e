"""What was trained and saved: training runs and their checkpoints, to be looked at, published, fetched and deleted."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO, Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from etude.service.server import bodies
from etude.service.server.checkpoints import KINDS, SCHEME, archive, delete_checkpoint, find_checkpoint, path_of
from etude.service.server.service import Refusal, Service
from etude.service.server.who import Owner, Served

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=1 << 31)]
_archiving = threading.Lock()
_ALIVE = "(expires IS NULL OR expires>?)"


def runs_router() -> APIRouter:
    """Return the calls about runs, sessions and checkpoints."""
    router = APIRouter()

    @router.get("/training_runs")
    def training_runs(service: Served, owner: Owner, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        query = "SELECT * FROM models WHERE owner=? ORDER BY created DESC LIMIT ? OFFSET ?"
        rows = service.store.all(query, owner, limit, offset)
        total = service.store.one("SELECT COUNT(*) AS n FROM models WHERE owner=?", owner)["n"]
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"training_runs": [_run(service, row) for row in rows], "cursor": cursor}

    @router.get("/training_runs/{model}")
    def training_run(model: str, service: Served, owner: Owner) -> dict[str, Any]:
        return _run(service, service.owned("models", model, owner))

    @router.get("/training_runs/{model}/checkpoints")
    def checkpoints_of_run(model: str, service: Served, owner: Owner) -> dict[str, Any]:
        service.owned("models", model, owner)
        query = f"SELECT * FROM checkpoints WHERE model=? AND {_ALIVE} ORDER BY created"
        return {"checkpoints": [_checkpoint(row) for row in service.store.all(query, model, time.time())]}

    @router.get("/checkpoints")
    def checkpoints(service: Served, owner: Owner, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
        where = f"FROM checkpoints WHERE owner=? AND {_ALIVE}"
        rows = service.store.all(
            f"SELECT * {where} ORDER BY created DESC LIMIT ? OFFSET ?", owner, time.time(), limit, offset
        )
        total = service.store.one(f"SELECT COUNT(*) AS n {where}", owner, time.time())["n"]
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"checkpoints": [_checkpoint(row) for row in rows], "cursor": cursor}

    @router.post("/weights_info")
    def weights_info(body: bodies.WeightsPath, service: Served, owner: Owner) -> dict[str, Any]:
        row = find_checkpoint(service.store, body.tinker_path, owner)
        adapter = json.loads(row["adapter"])
        chosen = {name: adapter[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        # The client makes a model of any saved state through its LoRA call, rank 0 included, and insists on is_lora.
        return {"base_model": row["base"], "is_lora": True, "lora_rank": adapter["rank"], **chosen}

    _add_session_calls(router)
    _add_checkpoint_calls(router)
    return router


def _add_session_calls(router: APIRouter) -> None:
    @router.get("/sessions")
    def sessions(service: Served, owner: Owner, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        query = "SELECT id FROM sessions WHERE owner=? ORDER BY created DESC LIMIT ? OFFSET ?"
        return {"sessions": [row["id"] for row in service.store.all(query, owner, limit, offset)]}

    @router.get("/sessions/{session}")
    def session(session: str, service: Served, owner: Owner) -> dict[str, Any]:
        about = json.loads(service.owned("sessions", session, owner)["about"])
        models = service.store.all("SELECT id FROM models WHERE session=? ORDER BY created", session)
        samplers = service.store.all("SELECT id FROM samplers WHERE session=? ORDER BY created", session)
        return {
            "training_run_ids": [row["id"] for row in models], "sampler_ids": [row["id"] for row in samplers],
            "user_metadata": about["user_metadata"], "display_name": about["display_name"],
        }  # fmt: skip

    @router.post("/sessions/{session}/finish")
    def finish_session(session: str, service: Served, owner: Owner) -> dict[str, Any]:
        service.owned("sessions", session, owner)
        return {}


def _add_checkpoint_calls(router: APIRouter) -> None:
    place = "/training_runs/{model}/checkpoints/{kind}/{name}"

    @router.delete(place)
    def delete(model: str, kind: str, name: str, service: Served, owner: Owner) -> dict[str, Any]:
        delete_checkpoint(service.store, _own(service, model, kind, name, owner))
        return {}

    @router.post(place + "/publish")
    def publish(model: str, kind: str, name: str, service: Served, owner: Owner) -> dict[str, Any]:
        _change(service, _own(service, model, kind, name, owner), "public", 1)
        return {}

    @router.delete(place + "/publish")
    def unpublish(model: str, kind: str, name: str, service: Served, owner: Owner) -> dict[str, Any]:
        _change(service, _own(service, model, kind, name, owner), "public", 0)
        return {}

    @router.put(place + "/ttl")
    def set_ttl(model: str, kind: str, name: str, body: bodies.Ttl, service: Served, owner: Owner) -> dict[str, Any]:
        expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        _change(service, _own(service, model, kind, name, owner), "expires", expires)
        return {}

    @router.get(place + "/archive")
    def archive_url(request: Request, model: str, kind: str, name: str, service: Served, owner: Owner) -> Response:
        find_checkpoint(service.store, f"{SCHEME}{model}/{kind}/{name}", owner)
        until = datetime.fromtimestamp(time.time() + 3600, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        file = request.url.replace(path=f"{request.url.path}.tar", query="")
        return RedirectResponse(file, 302, headers={"Expires": until})

    @router.get(place + "/archive.tar")
    def archive_file(model: str, kind: str, name: str, service: Served, owner: Owner) -> Response:
        row = find_checkpoint(service.store, f"{SCHEME}{model}/{kind}/{name}", owner)
        with _archiving:  # one at a time is in memory; what waits to be sent is on the disk
            file = archive(service.store, row)
        size = file.seek(0, os.SEEK_END)
        return StreamingResponse(_pieces(file), media_type="application/x-tar", headers={"Content-Length": str(size)})


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file from its beginning, and close it, also when nobody wants the rest."""
    with file:
        file.seek(0)
        while piece := file.read(1 << 20):
            yield piece


def _own(service: Service, model: str, kind: str, name: str, owner: str) -> sqlite3.Row:
    query = "SELECT * FROM checkpoints WHERE model=? AND kind=? AND name=? AND owner=?"
    found = service.store.find(query, model, kind, name, owner)
    if found is None:
        raise Refusal(404, f"there is no checkpoint {SCHEME}{model}/{kind}/{name}"[:300])
    return found


def _change(service: Service, row: sqlite3.Row, column: str, value: Any) -> None:
    key = row["model"], row["kind"], row["name"]
    with service.store.writing() as db:
        db.execute(f"UPDATE checkpoints SET {column}=? WHERE model=? AND kind=? AND name=?", (value, *key))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}", "checkpoint_type": KINDS[row["kind"]],
        "time": _time(row["created"]), "tinker_path": path_of(row), "size_bytes": row["size"],
        "public": bool(row["public"]), "user_metadata": json.loads(row["about"]), "expires_at": _time(row["expires"]),
    }  # fmt: skip


def _run(service: Service, row: sqlite3.Row) -> dict[str, Any]:
    rank = json.loads(row["adapter"])["rank"]
    query = "SELECT * FROM checkpoints WHERE model=? AND kind=? ORDER BY created DESC LIMIT 1"
    last = {kind: service.store.find(query, row["id"], kind) for kind in KINDS}
    weights, sampler = (None if last[kind] is None else _checkpoint(last[kind]) for kind in KINDS)  # type: ignore[arg-type]
    return {
        "training_run_id": row["id"], "base_model": row["base"], "model_owner": row["owner"], "is_lora": bool(rank),
        "lora_rank": rank, "corrupted": False, "last_request_time": _time(row["asked"]), "last_checkpoint": weights,
        "last_sampler_checkpoint": sampler, "user_metadata": json.loads(row["about"]),
    }  # fmt: skip
