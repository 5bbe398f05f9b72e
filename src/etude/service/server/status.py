"""The page that shows what a service is doing, and the figures that it is refreshed with."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections import deque
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import Field, FiniteFloat

from etude.runs.charts import Series, plan_chart
from etude.runs.page import PACKAGE, render
from etude.service.server.bodies import Body
from etude.service.server.service import Counts, Refusal, Service
from etude.service.server.who import Owner, Served

RATE_S: Final = 30.0
"""Rates are over about this long."""
MOST_MODELS: Final = 50
DRAWN_MODELS: Final = 6
"""Models whose curves are shown: as many as there are colours."""
MOST_POINTS: Final = 1000
MOST_CURVES: Final = 100
"""Names of curves that one model may have."""
_Name = Annotated[str, Field(min_length=1, max_length=100)]


class Report(Body):
    """Figures that a client knows and the service does not: rewards, say."""

    step: int | None = Field(None, ge=0, lt=1 << 62)
    values: Annotated[dict[_Name, FiniteFloat], Field(min_length=1, max_length=20)]


class Rates:
    """Tokens a second, over the last while."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._seen: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])

    def look(self) -> dict[str, float]:
        """Return what was trained and drawn a second since some half a minute ago."""
        now, trained, drawn = time.monotonic(), self._counts.trained_tokens, self._counts.drawn_tokens
        while len(self._seen) > 1 and now - self._seen[1][0] >= RATE_S:
            self._seen.popleft()
        then, trained_then, drawn_then = self._seen[0]
        if now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, trained, drawn))
        spent_s = max(now - then, 1.0)
        return {"trained": (trained - trained_then) / spent_s, "drawn": (drawn - drawn_then) / spent_s}


def status_router() -> APIRouter:
    """Return the page, its figures, and the call that adds to its curves."""
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse)
    def page(request: Request, service: Served) -> HTMLResponse:
        owner: str | None = request.app.state.keys.owner(request.headers)
        # Whoever has a key gives it to the page; without one it shows nothing.
        seen = None if owner is None else _seen(request, service, owner)
        script, digest = _script()
        return HTMLResponse(
            render("service/server/status.html", seen=seen, script=script, script_digest=digest),
            headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"},
        )

    @router.get("/status")
    def status(request: Request, service: Served, owner: Owner) -> dict[str, Any]:
        seen = _seen(request, service, owner)
        html = render("service/server/status_parts.html", seen=seen)
        return {**{name: seen[name] for name in ("tokens_per_s", "waiting", "models")}, "html": html}

    @router.post("/api/v1/training_runs/{model}/curves")
    def report(model: str, body: Report, service: Served, owner: Owner) -> dict[str, Any]:
        found = service.owned("models", model, owner)
        step = int(found["steps"]) if body.step is None else body.step
        with service.store.writing() as db:
            known = {row["name"] for row in db.execute("SELECT DISTINCT name FROM curves WHERE model=?", (model,))}
            if len(known | set(body.values)) > MOST_CURVES:
                raise Refusal(400, f"{model} has {len(known)} curves, and {MOST_CURVES} are the most")
            for name, value in body.values.items():
                db.execute("INSERT OR REPLACE INTO curves VALUES (?, ?, ?, ?)", (model, name, step, value))
        return {"step": step}

    return router


def _seen(request: Request, service: Service, owner: str) -> dict[str, Any]:
    """Return what an owner is shown."""
    query = "SELECT * FROM models WHERE owner=? ORDER BY asked DESC LIMIT ?"
    rows = service.store.all(query, owner, MOST_MODELS)
    query = "SELECT target, COUNT(*) AS n FROM requests WHERE owner=? AND state='pending' GROUP BY target"
    waiting = {row["target"]: int(row["n"]) for row in service.store.all(query, owner)}
    query = "SELECT value FROM curves WHERE model=? AND name='reward' ORDER BY step DESC LIMIT 1"
    models = [
        {
            "id": row["id"], "base": row["base"], "rank": json.loads(row["adapter"])["rank"], "steps": row["steps"],
            "loss": row["loss"], "waiting": waiting.get(row["id"], 0), "is_unloaded": bool(row["unloaded"]),
            "reward": None if (last := service.store.find(query, row["id"])) is None else last["value"],
            "asked": f"{datetime.fromtimestamp(row['asked'], UTC):%Y-%m-%d %H:%M:%S}",
        }
        for row in rows
    ]  # fmt: skip
    training = sum(waiting.get(row["id"], 0) for row in rows)
    return {
        "tokens_per_s": request.app.state.rates.look(), "models": models, "bases": service.bases.names,
        "waiting": {
            "training": training, "sampling": sum(waiting.values()) - training, "live": request.app.state.live.waiting,
        },
        "counts": service.counts, "charts": _charts(service, models[:DRAWN_MODELS]), "drawn": DRAWN_MODELS,
    }  # fmt: skip


def _charts(service: Service, models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lay out a chart for each name of a curve, loss and reward first, with a line for each model."""
    lines: dict[str, list[Series]] = {}
    for model in models:
        every = max(1, model["steps"] // MOST_POINTS)
        query = "SELECT name, step, value FROM curves WHERE model=? AND step%?=0 ORDER BY name, step"
        found: dict[str, tuple[list[float], list[float]]] = {}
        for row in service.store.all(query, model["id"], every):
            steps, values = found.setdefault(row["name"], ([], []))
            steps.append(row["step"])
            values.append(float("nan") if row["value"] is None else row["value"])  # SQLite has no NaN
        for name, (steps, values) in found.items():
            lines.setdefault(name, []).append(Series(model["id"], steps, values))
    order = sorted(lines, key=lambda name: (name != "loss", name != "reward", name))
    return [plan_chart(name, lines[name]) for name in order]


@cache
def _script() -> tuple[str, str]:
    """Return the script of the page and the hash that lets it run, and no other."""
    script = (PACKAGE / "service/server/status.js").read_text(encoding="utf-8")
    return script, base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
