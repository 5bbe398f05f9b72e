"""The OpenAI protocol: completions, chat and the list of models, for whatever policy the service has.

Beyond the protocol, every choice has `token_ids`, the tokens that were drawn: what a learner trains on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from etude.errors import EtudeError, one_line
from etude.service.server.access import error_body
from etude.service.server.checkpoints import path_of
from etude.service.server.live import NEWEST, Ask, Live, LiveDrawing, ServedWeights, Told, find_weights
from etude.service.server.openai_bodies import MAX_PROMPTS, Chat, Complete, DrawingBody
from etude.service.server.openai_text import TextStream, chat_logprobs, text_logprobs
from etude.service.server.service import Refusal, Service
from etude.service.server.who import Owner, Served

CHAT_TOKENS: Final = 512
"""Tokens of an answer at most, unless the client says."""
LOOK_S: Final = 1.0
"""How often a client that waits is looked at: one that has gone is not drawn for."""
Kind = Literal["text_completion", "chat.completion"]


def drawing(request: Request) -> LiveDrawing:
    """Return what draws for a request."""
    found: LiveDrawing = request.app.state.live
    return found


Drawn = Annotated[LiveDrawing, Depends(drawing)]


def openai_router() -> APIRouter:
    """Return the calls of the OpenAI client."""
    router = APIRouter()

    @router.get("/models")
    def models(service: Served, owner: Owner) -> dict[str, Any]:
        return {"object": "list", "data": _models(service, owner)}

    @router.get("/models/{name:path}")
    def model(name: str, service: Served, owner: Owner) -> dict[str, Any]:
        find_weights(service, name, owner)
        listed = (one for one in _models(service, owner) if one["id"] == name)
        return next(listed, _model(name, time.time(), owner))

    @router.post("/completions")
    async def completions(body: Complete, request: Request, service: Served, owner: Owner, live: Drawn) -> Response:
        def encode(base: str) -> list[list[int]]:
            policy = service.bases.get(base)
            return [policy.encode(one) if isinstance(one, str) else one for one in body.prompts]

        ask = await run_in_threadpool(_ask, service, owner, body, encode, body.max_tokens, body.logprobs or 0)
        answering = _Answering(service, ask, body, "text_completion", body.logprobs is not None)
        return await answering.answer(request, live)

    @router.post("/chat/completions")
    async def chat_completions(body: Chat, request: Request, service: Served, owner: Owner, live: Drawn) -> Response:
        limit = body.max_tokens or body.max_completion_tokens
        ask = await run_in_threadpool(
            _ask, service, owner, body, lambda base: [_chat(service, base, body)], limit, body.top_logprobs or 0
        )
        return await _Answering(service, ask, body, "chat.completion", body.logprobs).answer(request, live)

    return router


def _models(service: Service, owner: str) -> list[dict[str, Any]]:
    """List what can be asked for by name: base models, runs that saved weights, and these weights."""
    found = [_model(name, 0.0, "etude") for name in service.bases.names]
    query = "SELECT * FROM checkpoints WHERE owner=? AND (expires IS NULL OR expires>?) ORDER BY created"
    rows = service.store.all(query, owner, time.time())
    query = "SELECT model, created FROM samplers WHERE owner=? AND ephemeral=1 AND file!='gone'"
    drawn = service.store.all(query, owner)
    runs = {row["model"]: row["created"] for row in sorted([*rows, *drawn], key=lambda row: row["created"])}
    found += [_model(name, created, owner) for name, created in runs.items()]
    found += [_model(path_of(row), row["created"], owner) for row in rows]
    return [*found, _model(NEWEST, max(runs.values()), owner)] if runs else found


def _model(name: str, created: float, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner}


def _chat(service: Service, base: str, body: Chat) -> list[int]:
    policy = service.bases.get(base)
    if not getattr(policy.tokenizer, "chat_template", None):
        raise Refusal(400, f"{base!r} has no chat template; use /v1/completions")
    try:
        return policy.encode_chat([message.as_template() for message in body.messages])
    except Exception as error:  # noqa: BLE001 - templates refuse conversations in whatever way they like
        raise Refusal(400, f"the chat template of {base!r} refuses this conversation: {one_line(error)}") from None


def _ask(
    service: Service,
    owner: str,
    body: DrawingBody,
    encode: Callable[[str], list[list[int]]],
    limit: int | None,
    top: int,
) -> Ask:
    """Return what a client asks for; refuse what cannot be drawn."""
    weights: ServedWeights = find_weights(service, body.model, owner)
    context, vocabulary = service.bases.context(weights.base), service.bases.vocabulary(weights.base)
    prompts = encode(weights.base)
    if len(prompts) * body.n > MAX_PROMPTS:
        raise Refusal(400, f"{len(prompts)} prompts with n={body.n} are too many: {MAX_PROMPTS} completions at most")
    for prompt in prompts:
        wanted = limit or min(CHAT_TOKENS, max(1, context - len(prompt)))
        if not prompt:
            raise Refusal(400, "a prompt has no tokens; begin it with at least one")
        if max(prompt) >= vocabulary:
            raise Refusal(400, f"a prompt has the token {max(prompt)}; the model knows 0 to {vocabulary - 1}")
        if len(prompt) + wanted > context:
            size = f"a prompt has {len(prompt)} tokens, which with max_tokens={wanted}"
            raise Refusal(400, f"{size} exceeds the context of {context}")
    room = context - max(map(len, prompts))
    seed = secrets.randbits(62) if body.seed is None else body.seed
    return Ask(
        weights, prompts, body.n, limit or min(CHAT_TOKENS, room), body.temperature, body.top_p, max(0, body.top_k),
        tuple(body.stop), seed, owner, not body.ignore_eos, top,
    )  # fmt: skip


class _Answering:
    """Makes one answer: whole, or in pieces as they are drawn."""

    def __init__(self, service: Service, ask: Ask, body: DrawingBody, kind: Kind, with_logprobs: bool) -> None:
        self._ask, self._body, self._kind, self._with_logprobs = ask, body, kind, with_logprobs
        self._tokenizer = service.bases.get(ask.weights.base).tokenizer
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": body.model}

    async def answer(self, request: Request, drawing: LiveDrawing) -> Response:
        if self._body.stream:
            pieces: asyncio.Queue[tuple[int, Told, str]] = asyncio.Queue()
            live = drawing.submit(self._ask, self._hearer(pieces))
            return StreamingResponse(self._stream(live, pieces), media_type="text/event-stream")
        live = drawing.submit(self._ask)
        try:
            while not live.done.done():
                await asyncio.wait([live.done], timeout=LOOK_S)
                if await request.is_disconnected():
                    return Response(status_code=499)
        finally:
            live.is_gone = True
        drawn = [one for group in live.done.result() for one in group]
        choices = [
            self._choice(at, one.text, live.told[at], one.finish_reason, is_piece=False) for at, one in enumerate(drawn)
        ]
        return JSONResponse({**self._head, "object": self._kind, "choices": choices, "usage": self._usage(live)})

    def _usage(self, live: Live) -> dict[str, int]:
        read, drawn = sum(map(len, self._ask.prompts)), sum(map(len, live.told))
        return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}

    def _choice(
        self, at: int, text: str, told: list[Told], reason: str | None, *, is_piece: bool, said_before: int = 0
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": at, "finish_reason": reason, "logprobs": None}
        if self._kind == "text_completion":
            choice["text"] = text
            if self._with_logprobs:
                choice["logprobs"] = text_logprobs(self._tokenizer, told, self._ask.top, said_before)
        else:
            choice["delta" if is_piece else "message"] = {"role": "assistant", "content": text}
            if self._with_logprobs:
                choice["logprobs"] = chat_logprobs(self._tokenizer, told)
        if self._body.return_token_ids:
            choice["token_ids"] = [token for token, _, _ in told]
        return choice

    # ---- in pieces ---------------------------------------------------------------------------------------------------

    def _hearer(self, pieces: asyncio.Queue[tuple[int, Told, str]]) -> Callable[[int, Told], None]:
        loop = asyncio.get_running_loop()
        self._texts = [TextStream(self._tokenizer, self._ask.stops) for _ in range(self._ask.rows)]

        def hear(choice: int, told: Told) -> None:
            text = self._texts[choice].add(told[0])
            loop.call_soon_threadsafe(pieces.put_nowait, (choice, told, text))

        return hear

    async def _stream(self, live: Live, pieces: asyncio.Queue[tuple[int, Told, str]]) -> AsyncIterator[str]:
        said = [0] * self._ask.rows
        try:
            while not (live.done.done() and pieces.empty()):
                getting = asyncio.ensure_future(pieces.get())
                either: list[asyncio.Future[Any]] = [getting, live.done]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    continue
                at, told, text = getting.result()
                yield self._event([self._choice(at, text, [told], None, is_piece=True, said_before=said[at])])
                said[at] += len(text)
            drawn = [one for group in live.done.result() for one in group]
            for at, one in enumerate(drawn):
                rest = self._texts[at].rest(one.text)
                yield self._event([self._choice(at, rest, [], one.finish_reason, is_piece=True, said_before=said[at])])
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield self._event([], self._usage(live))
            yield "data: [DONE]\n\n"
        except EtudeError as error:  # the status is sent already
            yield f"data: {json.dumps(error_body('/v1/', getattr(error, 'status', 400), str(error)))}\n\n"
        finally:
            live.is_gone = True

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        name = "text_completion" if self._kind == "text_completion" else "chat.completion.chunk"
        return f"data: {json.dumps({**self._head, 'object': name, 'choices': choices, 'usage': usage})}\n\n"
