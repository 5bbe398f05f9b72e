"""What one client can take from others: nothing but its share of sessions, of turns, and of waiting."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.service.server.codec import message_of_json
from etude.service.server.service import SESSION_S, Limits, Refusal, Service
from tests.served import KEY, Served

pytest.importorskip("peft")
pytest.importorskip("fastapi")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    found = Service(tmp_path / "state", ["tiny"], Limits(sessions=2, queue=5))
    yield found
    found.store.close()


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_a_key_has_so_many_sessions_open_and_others_have_theirs(service: Service) -> None:
    service.create_session("ada", {})
    first = service.create_session("ada", {})
    with pytest.raises(Refusal, match="2 sessions of this key are open, which is the most; use one of them") as found:
        service.create_session("ada", {})
    assert found.value.status == 429
    service.create_session("ben", {})
    with service.store.writing() as db:
        db.execute("UPDATE sessions SET seen=seen-? WHERE id=?", (SESSION_S + 1, first))
    service.create_session("ada", {})  # that one has not been heard of for an hour
    service.hear_session(first, "ada")  # and is back
    with pytest.raises(Refusal, match="3 sessions"):
        service.create_session("ada", {})


def test_sessions_that_nobody_used_are_forgotten_after_a_day(service: Service) -> None:
    used, unused = service.create_session("ada", {}), service.create_session("ada", {})
    service.create_sampler("ada", used, 0, "tiny", None)
    fresh = service.create_session("ben", {})
    with service.store.writing() as db:
        db.execute("UPDATE sessions SET seen=seen-? WHERE owner='ada'", (25 * SESSION_S,))
    service.forget_sessions()
    assert {row["id"] for row in service.store.all("SELECT id FROM sessions")} == {used, fresh}
    with pytest.raises(Refusal, match="there is no session"):
        service.hear_session(unused, "ada")


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_keys_take_turns_in_live_sampling(service: Service) -> None:
    from etude.service.server.live import Ask, LiveDrawing, ServedWeights

    drawing, order = LiveDrawing(service), []

    def ask(owner: str, number: int, temperature: float) -> Any:
        return Ask(ServedWeights("tiny"), [[number]], 1, 4, temperature, 1.0, 0, (), 0, owner)

    async def queue() -> None:
        for number in range(5):
            drawing.submit(ask("ada", number, 1.0))
        with pytest.raises(Refusal, match="5 requests of this key are waiting") as found:
            drawing.submit(ask("ada", 5, 1.0))
        assert found.value.status == 429
        for number in (10, 11):  # of another temperature: they are not drawn side by side with hers
            drawing.submit(ask("ben", number, 0.5))
        while drawing.waiting:
            order.append([live.ask.prompts[0][0] for live in drawing.take(64)])

    asyncio.run(queue())
    assert order == [[0], [10], [1], [11], [2, 3, 4]]


def test_keys_share_the_rows_that_are_drawn_side_by_side(service: Service) -> None:
    from etude.service.server.live import Ask, LiveDrawing, ServedWeights

    drawing = LiveDrawing(service)

    async def queue() -> list[list[int]]:
        for owner, first in (("ada", 0), ("ben", 10)):
            for number in range(first, first + 4):
                drawing.submit(Ask(ServedWeights("tiny"), [[number]], 1, 4, 1.0, 1.0, 0, (), 0, owner))
        taken = drawing.take(3)
        like = taken[0].ask
        return [[live.ask.prompts[0][0] for live in some] for some in (taken, drawing.take(3, like))]

    assert asyncio.run(queue()) == [[0, 10, 1], [11, 2, 12]]


# ---- bodies that are not read ----------------------------------------------------------------------------------------


def _model(served: Served) -> str:
    session = served.call("/api/v1/create_session", {})[1]["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    made = served.call("/api/v1/create_model", body)[1]
    served.result(made)
    return str(made["model_id"])


def _goes_on(served: Served, model: str) -> None:
    """The next call is done at once: one that waits for the call before it is answered 408 first."""
    status, sent = served.call("/api/v1/save_weights", {"model_id": model, "seq_id": 2, "path": "kept"})
    assert status == 200
    status, found = served.call("/api/v1/retrieve_future", {"request_id": sent["request_id"]})
    assert (status, found.get("path")) == (200, f"tinker://{model}/weights/kept")


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_a_body_that_is_too_large_has_had_its_turn(served: Served, is_first: bool) -> None:
    model = _model(served)
    about = {"model_id": model, "seq_id": 1}
    body = {**(about if is_first else {}), "adam_params": {"learning_rate": 1e-3}, "note": "x" * (5 << 20), **about}
    status, said = served.call("/api/v1/optim_step", body)
    assert status == 413 and "too large" in said["detail"]
    _goes_on(served, model)


@pytest.mark.slow
def test_protobuf_that_is_too_large_has_had_its_turn_when_its_beginning_has_come(served: Served) -> None:
    model = _model(served)
    chunk = {"type": "encoded_text", "tokens": [5, 9]}
    inputs = {"target_tokens": {"data": [9, 12], "dtype": "int64"}}
    work = {"loss_fn": "cross_entropy", "data": [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}]}
    message = message_of_json({"model_id": model, "seq_id": 1, "forward_backward_input": work}, forward_only=False)
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
    head += f"Content-Type: application/x-protobuf\r\nContent-Length: {1 << 30}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as line:
        line.sendall(head.encode() + message.SerializeToString())
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    _goes_on(served, model)


@pytest.mark.slow
def test_a_body_that_does_not_say_whose_turn_it_is_is_logged(served: Served) -> None:
    status, _ = served.call("/api/v1/optim_step", {"note": "x" * (5 << 20)})
    assert status == 413
    # The answer comes first: who sends a large body may be waiting for it before the rest is known.
    deadline_s = time.monotonic() + 60
    while "a refused optim_step names no model and number" not in served.log.read_text():
        assert time.monotonic() < deadline_s, served.log.read_text()[-2000:]
        time.sleep(0.05)
