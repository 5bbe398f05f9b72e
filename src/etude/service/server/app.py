"""The HTTP side of a service: the calls that the Tinker client makes, and nothing that decides anything."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from etude.errors import EtudeError
from etude.service.server import bodies
from etude.service.server.access import BodyLimit, Keys
from etude.service.server.checkpoints import drop_expired
from etude.service.server.codec import canonical_json, message_of_json, parse_message
from etude.service.server.futures import futures_router
from etude.service.server.metrics import render_metrics
from etude.service.server.runs import runs_router
from etude.service.server.service import Refusal, Service
from etude.service.server.who import Owner, Served

PROTOBUF = "application/x-protobuf"


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

    app = FastAPI(title="Etude training service", lifespan=living, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, most=service.limits.body_bytes)
    app.state.service, app.state.keys = service, keys
    app.add_exception_handler(EtudeError, _say_refusal)
    app.add_exception_handler(HTTPException, _say_http)
    for status in (404, 405):
        app.add_exception_handler(status, _say_missing)
    app.add_exception_handler(RequestValidationError, _say_invalid)
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
        app.include_router(router, prefix="/api/v1")
    return app


async def _tidy(service: Service) -> None:
    """Drop, every minute, what has been kept for long enough."""
    while True:
        await asyncio.sleep(60.0)
        await run_in_threadpool(drop_expired, service.store)
        await run_in_threadpool(service.store.forget_results, time.time() - service.limits.keep_results_s)


# ---- errors ----------------------------------------------------------------------------------------------------------


async def _say_refusal(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, getattr(error, "status", 400))


async def _say_missing(request: Request, error: Any) -> Response:
    detail = f"this service does not offer {request.method} {request.url.path[:200]}"
    return JSONResponse({"detail": detail}, error.status_code)


async def _say_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": str(error.detail)}, error.status_code)


async def _say_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:])[:200] or "the body"
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return JSONResponse({"detail": f"{place}: {first['msg']}{more}"}, 422)


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
    def client_config() -> dict[str, Any]:
        return {
            "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False,
            "proto_write_fwdbwd": True, "create_model_via_load_weights": False, "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False, "sample_join_sampling_session": True,
        }  # fmt: skip

    @router.post("/client/dynamic_config")
    def client_dynamic_config() -> dict[str, Any]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    @router.post("/create_session")
    def create_session(body: bodies.CreateSession, service: Served, owner: Owner) -> dict[str, Any]:
        about = {"tags": body.tags, "user_metadata": body.user_metadata, "display_name": body.display_name}
        return {"type": "create_session", "session_id": service.create_session(owner, about)}

    @router.post("/session_heartbeat")
    def session_heartbeat(body: bodies.Session, service: Served, owner: Owner) -> dict[str, Any]:
        service.owned("sessions", body.session_id, owner)
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
        lora = (body.lora_config or bodies.Lora(rank=0)).model_dump()
        model, request = service.create_model(
            owner, body.session_id, body.model_seq_id, body.base_model, lora, body.user_metadata
        )
        return {"request_id": request, "model_id": model}

    @router.post("/get_info")
    def get_info(body: bodies.Model, service: Served, owner: Owner) -> dict[str, Any]:
        model = service.owned("models", body.model_id, owner)
        rank, base = json.loads(model["adapter"])["rank"], model["base"]
        arch = str(service.bases.get(base).causal.config.model_type)
        data = {"arch": arch, "model_name": base, "tokenizer_id": service.bases.tokenizer_id(base)}
        return {
            "type": "get_info", "model_id": model["id"], "model_name": base, "model_data": data, "is_lora": bool(rank),
            "lora_rank": rank, "optimizer_config": {"type": "adamw"},
        }  # fmt: skip

    @router.post("/forward_backward")
    @router.post("/forward")
    async def forward_backward(request: Request, service: Served, owner: Owner) -> dict[str, Any]:
        body = await request.body()
        is_proto = request.headers.get("content-type", "").startswith(PROTOBUF)
        forward_only = request.url.path.endswith("/forward")

        def take() -> str:
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
        return _submit(service, owner, body, "save_weights", canonical_json(given))

    @router.post("/save_weights_for_sampler")
    def save_weights_for_sampler(body: bodies.SaveForSampler, service: Served, owner: Owner) -> dict[str, Any]:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise Refusal(400, "weights to draw from need a path, or a sampling_session_seq_id, and not both")
        given = {"name": body.path, **body.model_dump(include={"ttl_seconds", "user_metadata"})}
        payload = canonical_json({**given, "number": body.sampling_session_seq_id})
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
    def asample(body: bodies.Sample, service: Served, owner: Owner) -> dict[str, Any]:
        request = submit_sample(service, owner, body)
        return {"request_id": request, "sample_sequence_ids": [f"{request}-{at}" for at in range(body.num_samples)]}

    return router


def submit_sample(service: Service, owner: str, body: bodies.Sample) -> str:
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
    asked = {
        "prompt": prompt, "n": body.num_samples, "temperature": params.temperature, "top_p": params.top_p,
        "max_tokens": room if params.max_tokens is None else min(room, params.max_tokens),
        "top_k": max(0, params.top_k), "stop_texts": [stop for stop in stops if isinstance(stop, str)],
        "stop_tokens": [stop for stop in stops if isinstance(stop, int)], "ends": params.stop != [],
        "prompt_logprobs": bool(body.prompt_logprobs), "top_prompt": body.topk_prompt_logprobs,
        "top_sample": body.topk_sample_logprobs, "last_n": body.prompt_logprobs_last_n, "seed": params.seed,
    }  # fmt: skip
    # A sample without a seed is drawn with one of ours, written down with it: after a kill it is drawn the same.
    drawn = {**asked, "seed": secrets.randbits(62) if params.seed is None else params.seed}
    same = canonical_json(asked)
    return service.submit(owner, sampler["id"], body.seq_id, "sample", canonical_json(drawn), same=same)
