"""The HTTP side of a service: the calls that the Tinker client makes, and nothing that decides anything."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError

from etude.errors import EtudeError
from etude.service.server import bodies
from etude.service.server.access import PROTOBUF, Door, Keys, PassTurn, error_json
from etude.service.server.checkpoints import drop_expired, require_name
from etude.service.server.codec import canonical_json, message_of_json, parse_message
from etude.service.server.futures import futures_router
from etude.service.server.live import LiveDrawing
from etude.service.server.metrics import render_metrics
from etude.service.server.openai import openai_router
from etude.service.server.openapi import REFUSED, REFUSED_OPENAI, WORK
from etude.service.server.runs import runs_router
from etude.service.server.service import Refusal, Service
from etude.service.server.status import Rates, status_router
from etude.service.server.turns import ORDERED, turn_of
from etude.service.server.who import Owner, Served
from etude.service.server.worker import explain, log

LARGE = 1 << 20
"""Bodies above this many bytes are read one at a time: read, they take many times their size."""
_parsing = threading.Lock()


def make_app(service: Service, keys: Keys) -> FastAPI:
    """Return the application that serves a service to the holders of keys."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        service.loop = asyncio.get_running_loop()
        service.start()
        tidying = asyncio.create_task(_tidy(service))
        yield
        tidying.cancel()
        await run_in_threadpool(service.stop)

    app = FastAPI(
        title="Etude training service", lifespan=living, docs_url=None, redoc_url=None, redirect_slashes=False,
    )  # fmt: skip
    app.add_middleware(Door, keys=keys, most=service.limits.body_bytes, pass_turn=_passing(service))
    app.state.service, app.state.keys, app.state.live = service, keys, LiveDrawing(service)
    app.add_exception_handler(EtudeError, _say_refusal)
    app.add_exception_handler(HTTPException, _say_http)
    for status in (404, 405):
        app.add_exception_handler(status, _say_missing)
    app.add_exception_handler(RequestValidationError, _say_invalid)
    app.add_exception_handler(sqlite3.Error, _say_unwritten)
    app.add_exception_handler(Exception, _say_failed)
    app.include_router(_open_router())
    routers = (
        _session_router(),
        _training_router(),
        _saving_router(),
        _sampling_router(),
        futures_router(),
        runs_router(),
    )
    for router in routers:
        app.include_router(router, prefix="/api/v1", responses=REFUSED)
    app.include_router(openai_router(), prefix="/v1", responses=REFUSED_OPENAI)
    app.state.rates = Rates(service.counts)
    app.include_router(status_router(), responses=REFUSED)
    return app


async def _tidy(service: Service) -> None:
    """Drop, every minute, what has been kept for long enough."""
    while True:
        await asyncio.sleep(60.0)
        try:
            await run_in_threadpool(drop_expired, service.store)
            await run_in_threadpool(service.store.forget_results, time.time() - service.limits.keep_results_s)
            await run_in_threadpool(service.forget_sessions)
        except (OSError, sqlite3.Error) as error:
            explain(error, "tidying failed and is tried again")


# ---- errors ----------------------------------------------------------------------------------------------------------


def _say(request: Request, status: int, why: str, headers: Any = None) -> Response:
    return Response(error_json(request.scope["path"], status, why), status, headers, "application/json")


async def _say_refusal(request: Request, error: Exception) -> Response:
    status = getattr(error, "status", 400)
    if status == 400:
        await _pass_turn(request, str(error))
    return _say(request, status, str(error))


def _passing(service: Service) -> PassTurn:
    """Return what notes the turn of a call whose body was not read, if what is known of it tells whose turn."""

    async def pass_turn(path: str, owner: str, known: bytes, is_proto: bool, why: str) -> None:
        call = path.removeprefix("/api/v1/")
        if call not in ORDERED:
            return
        try:
            is_known = await run_in_threadpool(_note_turn, service, owner, call, why, known, is_proto)
        except (OSError, sqlite3.Error) as error:
            explain(error, "the turn of a refused %s was not written down", call)
            return
        if not is_known:
            wait_s = service.limits.gap_s
            log.warning("a refused %s names no model and number: what was sent after it waits %.0f s", call, wait_s)

    return pass_turn


async def _pass_turn(request: Request, why: str) -> None:
    """Note that a refused call has had its turn: its client goes on with the next number, which then need not wait."""
    call = request.scope["path"].removeprefix("/api/v1/")
    owner = request.app.state.keys.owner(request.headers)
    if call not in ORDERED or owner is None:
        return
    body = await request.body()  # read before, and kept
    is_proto = request.headers.get("content-type", "").startswith(PROTOBUF)
    await run_in_threadpool(_note_turn, request.app.state.service, owner, call, why, body, is_proto)


def _note_turn(service: Service, owner: str, call: str, why: str, body: bytes, is_proto: bool) -> bool:
    """Note the turn that a body names; tell whether it names one."""
    if found := turn_of(body, is_proto=is_proto):
        service.pass_turn(owner, *found, call, why)
    return found is not None


async def _say_missing(request: Request, error: Any) -> Response:
    detail = f"this service does not offer {request.method} {request.scope['path'][:200]}"
    return _say(request, error.status_code, detail, error.headers)


async def _say_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _say(request, error.status_code, str(error.detail))


async def _say_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])[:200] or "the body"
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    why = f"{place}: {first['msg'].removeprefix('Value error, ')}{more}"
    await _pass_turn(request, why)
    return _say(request, 400 if request.scope["path"].startswith("/v1/") else 422, why)


async def _say_unwritten(request: Request, error: Exception) -> Response:
    """The journal cannot be written: what was asked is not done, and may be asked again."""
    return _say(request, 503, explain(error, "%s was not written down", request.scope["path"][:200]))


async def _say_failed(request: Request, error: Exception) -> Response:
    return _say(request, 500, f"the service failed: {type(error).__name__}")


# ---- calls -----------------------------------------------------------------------------------------------------------


def _open_router() -> APIRouter:
    """What needs no key."""
    router = APIRouter()

    @router.get("/healthz")
    @router.get("/api/v1/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/metrics")
    def metrics(service: Served, owner: Owner) -> Response:
        return Response(render_metrics(service), media_type="text/plain; version=0.0.4")

    return router


def _session_router() -> APIRouter:
    router = APIRouter()

    @router.post("/client/config")
    def client_config(owner: Owner) -> dict[str, Any]:
        return {
            # Chunks sent all at once, of which one is refused, leave the client waiting for itself for ever.
            "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False,
            "proto_write_fwdbwd": True, "create_model_via_load_weights": False, "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False, "sample_join_sampling_session": True,
        }  # fmt: skip

    @router.post("/client/dynamic_config")
    def client_dynamic_config(owner: Owner) -> dict[str, Any]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    @router.post("/create_session")
    def create_session(body: bodies.CreateSession, service: Served, owner: Owner) -> dict[str, Any]:
        about = {"tags": body.tags, "user_metadata": body.user_metadata, "display_name": body.display_name}
        return {"type": "create_session", "session_id": service.create_session(owner, about)}

    @router.post("/session_heartbeat")
    def session_heartbeat(body: bodies.SessionBody, service: Served, owner: Owner) -> dict[str, Any]:
        service.hear_session(body.session_id, owner)
        return {"type": "session_heartbeat"}

    @router.post("/telemetry")
    def telemetry(owner: Owner) -> dict[str, str]:
        return {"status": "accepted"}

    @router.get("/get_server_capabilities")
    def capabilities(service: Served, owner: Owner) -> dict[str, Any]:
        models = [
            {"model_name": name, "max_context_length": service.bases.context(name), "trainable": True,
             "sampleable": True}
            for name in service.bases.names
        ]  # fmt: skip
        return {"supported_models": models}

    return router


def _training_router() -> APIRouter:
    router = APIRouter()

    @router.post("/create_model")
    def create_model(body: bodies.CreateModel, service: Served, owner: Owner) -> dict[str, Any]:
        lora = (body.lora_config or bodies.LoraBody(rank=0)).model_dump()
        model, request = service.create_model(
            owner, body.session_id, body.model_seq_id, body.base_model, lora, body.user_metadata
        )
        return {"request_id": request, "model_id": model}

    @router.post("/get_info")
    def get_info(body: bodies.Model, service: Served, owner: Owner) -> dict[str, Any]:
        model = service.owned("models", body.model_id, owner)
        rank, base = json.loads(model["adapter"])["rank"], model["base"]
        arch = str(service.bases.get(base).causal.config.model_type)
        tokenizer = service.bases.tokenizer_path(base, service.store.folder / "tokenizers")
        data = {"arch": arch, "model_name": base, "tokenizer_id": tokenizer}
        return {
            "type": "get_info", "model_id": model["id"], "model_name": base, "model_data": data, "is_lora": bool(rank),
            "lora_rank": rank, "optimizer_config": {"type": "adamw"},
        }  # fmt: skip

    @router.post("/forward_backward", openapi_extra=WORK)
    @router.post("/forward", openapi_extra=WORK)
    async def forward_backward(request: Request, service: Served, owner: Owner) -> dict[str, Any]:
        body = await request.body()
        is_proto = request.headers.get("content-type", "").startswith(PROTOBUF)
        forward_only = request.scope["path"].endswith("/forward")

        def take() -> str:
            with _parsing if len(body) > LARGE else nullcontext():
                message = parse_message(body) if is_proto else message_of_json(_json(body), forward_only=forward_only)
                return service.submit_work(owner, message)

        return {"request_id": await run_in_threadpool(take)}

    @router.post("/optim_step")
    def optim_step(body: bodies.OptimStep, service: Served, owner: Owner) -> dict[str, Any]:
        payload = canonical_json(body.adam_params.model_dump())
        return _submit(service, owner, body, "optim_step", payload)

    return router


def _saving_router() -> APIRouter:
    router = APIRouter()

    @router.post("/save_weights")
    def save_weights(body: bodies.SaveWeights, service: Served, owner: Owner) -> dict[str, Any]:
        given = {"name": body.path, **body.model_dump(include={"ttl_seconds", "overwrite", "user_metadata"})}
        _require_name(service, owner, body, "save_weights", canonical_json(given))
        return _submit(service, owner, body, "save_weights", canonical_json(given))

    @router.post("/save_weights_for_sampler")
    def save_weights_for_sampler(body: bodies.SaveForSampler, service: Served, owner: Owner) -> dict[str, Any]:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise Refusal(400, "weights to draw from need a path, or a sampling_session_seq_id, and not both")
        given = {"name": body.path, **body.model_dump(include={"ttl_seconds", "user_metadata"})}
        payload = canonical_json({**given, "number": body.sampling_session_seq_id})
        _require_name(service, owner, body, "save_weights_for_sampler", canonical_json(given))
        # The client counts sessions anew when it sends a request again.
        return _submit(service, owner, body, "save_weights_for_sampler", payload, same=canonical_json(given))

    @router.post("/load_weights")
    def load_weights(body: bodies.LoadWeights, service: Served, owner: Owner) -> dict[str, Any]:
        if body.model_id is None or body.session_id is not None or body.weights_access_token is not None:
            raise Refusal(400, "weights are loaded into a model that was created, without a token: send model_id")
        payload = canonical_json({"path": body.path, "optimizer": body.optimizer})
        return _submit(service, owner, body, "load_weights", payload)

    @router.post("/unload_model")
    def unload_model(body: bodies.Model, service: Served, owner: Owner) -> dict[str, Any]:
        service.owned("models", body.model_id, owner)
        return {"request_id": service.submit(owner, body.model_id, None, "unload_model", b"{}")}

    return router


def _require_name(service: Service, owner: str, body: Any, kind: str, same: bytes) -> None:
    """Refuse a name that could mean a place; the request has then taken its turn."""
    service.owned("models", body.model_id, owner)
    try:
        if body.path is not None:
            require_name(body.path)
    except EtudeError as error:
        service.submit(owner, body.model_id, body.seq_id or None, kind, same, refused=str(error))
        raise Refusal(400, str(error)) from None


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is neither JSON nor application/x-protobuf") from None
    if not isinstance(found, dict):
        raise Refusal(400, "the body is JSON, but no object")
    return found


def _submit(
    service: Service, owner: str, body: Any, kind: str, payload: bytes, same: bytes | None = None
) -> dict[str, Any]:
    service.owned("models", body.model_id, owner)
    return {"request_id": service.submit(owner, body.model_id, body.seq_id or None, kind, payload, same=same)}


def _sampling_router() -> APIRouter:
    router = APIRouter()

    @router.post("/create_sampling_session")
    def create_sampling_session(body: bodies.CreateSampler, service: Served, owner: Owner) -> dict[str, Any]:
        name = service.create_sampler(
            owner, body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": name}

    @router.post("/join_sampling_session")
    def join_sampling_session(body: bodies.SamplerName, service: Served, owner: Owner) -> dict[str, Any]:
        service.owned("samplers", body.sampling_session_id, owner)
        return {"type": "join_sampling_session", "client_counter": secrets.randbelow(1_000_000_000) + 1}

    @router.get("/samplers/{sampler}")
    def get_sampler(sampler: str, service: Served, owner: Owner) -> dict[str, Any]:
        row = service.owned("samplers", sampler, owner)
        return {"sampler_id": row["id"], "base_model": row["base"], "model_path": row["path"]}

    @router.post("/asample")
    def asample(body: bodies.SampleBody, service: Served, owner: Owner) -> dict[str, Any]:
        request = submit_sample(service, owner, body)
        return {"request_id": request, "sample_sequence_ids": [f"{request}-{at}" for at in range(body.num_samples)]}

    return router


def submit_sample(service: Service, owner: str, body: bodies.SampleBody) -> str:
    """Take a request for completions; refuse what cannot be drawn."""
    if body.sampling_session_id is None or body.seq_id is None:
        raise Refusal(400, "a sample needs sampling_session_id and seq_id; make a sampling session first")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(body, name):
            raise Refusal(400, f"this service does not offer {name}; leave it out")
    sampler = service.owned("samplers", body.sampling_session_id, owner)
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    params, base = body.sampling_params, sampler["base"]
    context, vocabulary = service.bases.context(base), service.bases.vocabulary(base)
    if not 0 < len(prompt) <= context:
        raise Refusal(400, f"the prompt has {len(prompt)} tokens; the model takes 1 to {context}")
    if max(prompt) >= vocabulary:
        raise Refusal(400, f"the prompt has the token {max(prompt)}; the model knows 0 to {vocabulary - 1}")
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or [])
    if "" in stops:
        raise Refusal(400, "stop holds an empty text, which would end everything at once")
    room = context - len(prompt)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    if most * body.num_samples > service.limits.drawn_tokens:
        asks = f"{body.num_samples} completions of {most} tokens"
        raise Refusal(400, f"{asks} are too many: {service.limits.drawn_tokens} tokens in one request are the most")
    asked = {
        "prompt": prompt, "n": body.num_samples, "temperature": params.temperature, "top_p": params.top_p,
        "max_tokens": most,
        "top_k": max(0, params.top_k), "stop_texts": [stop for stop in stops if isinstance(stop, str)],
        "stop_tokens": [stop for stop in stops if isinstance(stop, int)], "ends": params.stop != [],
        "prompt_logprobs": bool(body.prompt_logprobs), "top_prompt": body.topk_prompt_logprobs,
        "top_sample": body.topk_sample_logprobs, "last_n": body.prompt_logprobs_last_n, "seed": params.seed,
    }  # fmt: skip
    # A sample without a seed is drawn with one of ours, written down with it: after a kill it is drawn the same.
    drawn = {**asked, "seed": secrets.randbits(62) if params.seed is None else params.seed}
    same = canonical_json(asked)
    return service.submit(owner, sampler["id"], body.seq_id, "sample", canonical_json(drawn), same=same)
