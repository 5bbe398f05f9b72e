"""Who comes in, with how much, and what is told to whom: at the door, before anything else."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from etude.service.server.access import BODIES_IN_ALL, Door, Keys
from tests.served import KEY, Served

pytest.importorskip("peft")
pytest.importorskip("fastapi")
psutil = pytest.importorskip("psutil")

OTHER = "tml-another-key-for-tests"
HEAD = f"POST /api/v1/%s HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("access")
    (folder / "keys").write_text(f"ada {KEY}\nben {OTHER}\n")
    found = Served(folder / "state", "--keys", str(folder / "keys")).start()
    yield found
    found.stop()
    for line in found.log.read_text().splitlines()[1:]:  # the first says where it is
        assert json.loads(line).keys() >= {"time", "level", "logger", "message"}
    assert "Traceback" not in found.log.read_text()


@pytest.fixture(scope="module")
def theirs(served: Served) -> dict[str, str]:
    """Everything that the first key has: a name of each kind."""
    session = served.call("/api/v1/create_session", {})[1]["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    model = served.call("/api/v1/create_model", body)[1]
    found = {"session": session, "model": model["model_id"], "request": model["request_id"]}
    for call in ("save_weights", "save_weights_for_sampler"):
        sent = served.call(f"/api/v1/{call}", {"model_id": found["model"], "path": "kept"})[1]
        found[call] = served.result(sent)["path"]
    begin = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    found["sampler"] = served.call("/api/v1/create_sampling_session", begin)[1]["sampling_session_id"]
    return found


def _line(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=60)


def _memory(served: Served) -> int:
    return int(psutil.Process(served._pid).memory_info().rss)


# ---- how much --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, most", [("forward_backward", 64 << 20), ("create_session", 4 << 20)])
def test_a_body_that_says_it_is_too_large_is_refused_unread(served: Served, call: str, most: int) -> None:
    for size in (most + 1, 1 << 40, 10**30):
        with _line(served) as line:
            line.sendall(f"{HEAD % call}Content-Length: {size}\r\n\r\n".encode())
            assert line.recv(100).startswith(b"HTTP/1.1 413" if size < 10**20 else b"HTTP/1.1 4")


def test_a_body_that_does_not_say_how_large_it_is_is_refused_when_it_is_too_much(served: Served) -> None:
    piece = b"100000\r\n" + b"[" * (1 << 20) + b"\r\n"
    before = _memory(served)
    with _line(served) as line:
        line.sendall(f"{HEAD % 'create_session'}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        while sent < 64 and not select.select([line], [], [], 0)[0]:
            line.sendall(piece)
            sent += 1
        assert line.recv(100).startswith(b"HTTP/1.1 413")
    assert sent < 40  # MB, of which the system holds some on the way
    assert _memory(served) - before < 64 << 20


def test_strangers_are_turned_away_before_their_body_is_read(served: Served) -> None:
    with _line(served) as line:
        head = HEAD.replace(KEY, "tml-nobody-knows-this") % "forward_backward"
        line.sendall(f"{head}Content-Length: 60000000\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "kind, encoding, status, sentence",
    [
        ("text/plain", "", 415, "application/json"),
        ("", "", 415, "application/json"),
        ("application/x-protobuf", "", 415, "application/json"),
        ("application/json", "gzip", 415, "compressed"),
        ("application/json", "zstd", 415, "compressed"),
    ],
)
def test_bodies_of_another_kind_are_refused(
    served: Served, kind: str, encoding: str, status: int, sentence: str
) -> None:
    headers = {"Content_Type": kind} | ({"Content_Encoding": encoding} if encoding else {})
    found = served.call("/api/v1/create_session", b"{}", **headers)
    assert found[0] == status
    assert sentence in found[1]["detail"]


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "x/y", "a@b", ""])
def test_a_host_that_is_none_is_refused(served: Served, host: str) -> None:
    with _line(served) as line:
        line.sendall(f"GET /nowhere HTTP/1.1\r\nX-API-Key: {KEY}\r\nHost: {host}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 40")


def test_half_a_body_is_no_request(served: Served, theirs: dict[str, str]) -> None:
    """A client that vanishes while it sends has asked for nothing."""
    body = json.dumps({"model_id": theirs["model"], "path": "half"}).encode()
    for size in (len(body) + 5, len(body) + 1):
        with _line(served) as line:
            line.sendall(f"{HEAD % 'save_weights'}Content-Length: {size}\r\n\r\n".encode() + body)
    listed = served.call(f"/api/v1/training_runs/{theirs['model']}/checkpoints")[1]["checkpoints"]
    assert {one["tinker_path"].split("/")[-1] for one in listed} == {"kept"}


def _through_the_door(bodies: list[list[bytes]], most: int) -> list[int]:
    """Send bodies in pieces, all at once, to a door whose house keeps each until all have come; return the answers."""
    statuses: list[int] = []

    async def house(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    door = Door(house, Keys(), most)

    async def come(parts: list[bytes]) -> None:
        left = list(parts)

        async def receive() -> Any:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"host", b"x"), (b"content-type", b"application/json")]
        await door({"type": "http", "path": "/api/v1/forward", "headers": headers}, receive, send)

    async def all_come() -> None:
        await asyncio.gather(*(come(parts) for parts in bodies))

    asyncio.run(all_come())
    return statuses


def test_bodies_share_a_limited_room() -> None:
    whole = [b"x" * 50, b"x" * 50]
    assert _through_the_door([whole] * BODIES_IN_ALL, 100) == [200] * BODIES_IN_ALL
    found = _through_the_door([whole] * (BODIES_IN_ALL + 4), 100)
    assert 429 in found
    assert 200 in found
    assert _through_the_door([[b"x" * 60, b"x" * 60]], 100) == [413]


# ---- who -------------------------------------------------------------------------------------------------------------


def test_another_keys_things_do_not_exist_by_any_route(served: Served, theirs: dict[str, str]) -> None:
    mine = served.call("/api/v1/create_session", {}, key=OTHER)[1]["session_id"]
    model, session, sampler = theirs["model"], theirs["session"], theirs["sampler"]
    state, drawn = theirs["save_weights"], theirs["save_weights_for_sampler"]
    prompt = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}, "seq_id": 0}
    data = {"data": [{"model_input": {"chunks": [{"tokens": [5]}]}, "loss_fn_inputs": {}}], "loss_fn": "cross_entropy"}
    place = f"/api/v1/training_runs/{model}"
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/api/v1/session_heartbeat", {"session_id": session}),
        ("GET", f"/api/v1/sessions/{session}", None),
        ("POST", f"/api/v1/sessions/{session}/finish", None),
        ("POST", "/api/v1/create_model", {"session_id": session, "model_seq_id": 9, "base_model": "tiny"}),
        ("POST", "/api/v1/get_info", {"model_id": model}),
        ("POST", "/api/v1/forward_backward", {"model_id": model, "forward_backward_input": data}),
        ("POST", "/api/v1/forward", {"model_id": model, "forward_input": data}),
        ("POST", "/api/v1/optim_step", {"model_id": model, "adam_params": {}}),
        ("POST", "/api/v1/save_weights", {"model_id": model, "path": "x"}),
        ("POST", "/api/v1/save_weights_for_sampler", {"model_id": model, "path": "x"}),
        ("POST", "/api/v1/load_weights", {"model_id": model, "path": state, "optimizer": True}),
        ("POST", "/api/v1/unload_model", {"model_id": model}),
        ("POST", "/api/v1/weights_info", {"tinker_path": state}),
        ("GET", place, None),
        ("GET", f"{place}/checkpoints", None),
        ("DELETE", f"{place}/checkpoints/weights/kept", None),
        ("POST", f"{place}/checkpoints/weights/kept/publish", None),
        ("DELETE", f"{place}/checkpoints/weights/kept/publish", None),
        ("PUT", f"{place}/checkpoints/weights/kept/ttl", {"ttl_seconds": 1}),
        ("GET", f"{place}/checkpoints/weights/kept/archive", None),
        ("GET", f"{place}/checkpoints/weights/kept/archive.tar", None),
        ("POST", f"{place}/curves", {"values": {"reward": 1.0}}),
        ("POST", f"{place}/curves", {"values": {"reward": 1.0}, "step": 3}),
        ("POST", "/api/v1/create_sampling_session", {
            "session_id": session, "sampling_session_seq_id": 3, "base_model": "tiny"}),
        ("POST", "/api/v1/create_sampling_session", {
            "session_id": mine, "sampling_session_seq_id": 3, "model_path": drawn}),
        ("POST", "/api/v1/join_sampling_session", {"sampling_session_id": sampler}),
        ("GET", f"/api/v1/samplers/{sampler}", None),
        ("POST", "/api/v1/asample", {**prompt, "sampling_session_id": sampler}),
        ("POST", "/api/v1/retrieve_future", {"request_id": theirs["request"]}),
        ("POST", "/api/v1/retrieve_futures", {"target": {"sampling_session_id": sampler}}),
        ("POST", "/api/v1/cancel_future", {"request_id": theirs["request"]}),
        ("GET", f"/v1/models/{model}", None),
        ("GET", f"/v1/models/{drawn}", None),
        ("GET", "/v1/models/newest", None),
        ("POST", "/v1/completions", {"model": drawn, "prompt": "a"}),
        ("POST", "/v1/completions", {"model": model, "prompt": "a"}),
        ("POST", "/v1/completions", {"model": "newest", "prompt": "a"}),
        ("POST", "/v1/chat/completions", {"model": drawn, "messages": [{"role": "user", "content": "a"}]}),
    ]  # fmt: skip
    for method, path, body in calls:
        status, found = served.call(path, body, method=method, key=OTHER)
        assert status in (400, 404), (method, path, status, found)
        assert "no " in (found["error"]["message"] if path.startswith("/v1/") else found["detail"])
    for path in ("/status", "/", "/metrics", "/v1/models", "/api/v1/training_runs", "/api/v1/checkpoints"):
        status, found = served.call(path, key=OTHER)
        assert status == 200
        assert session not in str(found)
    assert session not in str(served.call("/api/v1/sessions", key=OTHER))
    assert served.call("/status")[1]["models"][0]["reward"] is None
    assert served.call(place)[1]["last_checkpoint"]["public"] is False


def test_a_published_checkpoint_is_read_by_others_and_changed_by_none(served: Served, theirs: dict[str, str]) -> None:
    place = f"/api/v1/training_runs/{theirs['model']}/checkpoints/sampler_weights/kept"
    assert served.call(f"{place}/publish", method="POST")[0] == 200
    mine = served.call("/api/v1/create_session", {}, key=OTHER)[1]["session_id"]
    begin = {"session_id": mine, "sampling_session_seq_id": 0, "model_path": theirs["save_weights_for_sampler"]}
    assert served.call("/api/v1/create_sampling_session", begin, key=OTHER)[0] == 200
    assert served.call(place, method="DELETE", key=OTHER)[0] == 404
    assert served.call(f"{place}/publish", method="DELETE")[0] == 200


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_health_and_figures_are_told_and_no_key_anywhere(served: Served, theirs: dict[str, str]) -> None:
    assert served.call("/healthz", key="") == served.call("/api/v1/healthz", key="") == (200, {"status": "ok"})
    assert served.call("/metrics", key="")[0] == 401
    status, text = served.call("/metrics")
    assert status == 200
    figures = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.decode().splitlines() if line[0] != "#"}
    assert figures["etude_models"] == 1
    assert figures['etude_busy_seconds_total{what="training"}'] > 0
    assert figures["etude_resident_models"] == 1
    told = [served.call(path)[1] for path in ("/", "/status", "/metrics", "/openapi.json", "/api/v1/training_runs")]
    told += [served.call(path, {"model_id": KEY}, key=OTHER)[1] for path in ("/api/v1/none", "/api/v1/optim_step")]
    told += [served.call("/api/v1/get_info", {"model_id": "x"}, key=f"{KEY}-and-more")[1]]
    for secret in (KEY, OTHER):
        assert secret not in str(told)
        assert secret not in served.log.read_text()
        assert not any(secret.encode() in path.read_bytes() for path in served.folder.rglob("*") if path.is_file())


def test_curves_are_shown_as_text(served: Served, theirs: dict[str, str]) -> None:
    place = f"/api/v1/training_runs/{theirs['model']}/curves"
    name = "<script>alert(1)</script>"
    for step, value in ((0, 1e308), (1, -1e308), ((1 << 62) - 1, 5e-324)):
        assert served.call(place, {"values": {name: value}, "step": step})[0] == 200
    for path in ("/", "/status"):
        status, found = served.call(path)
        assert status == 200
        assert name not in (found.decode() if isinstance(found, bytes) else found["html"])
    for start in range(0, 80, 20):
        assert served.call(place, {"values": {f"curve-{start + at}": 1.0 for at in range(20)}})[0] == 200
    status, found = served.call(place, {"values": {f"more-{at}": 1.0 for at in range(20)}})
    assert (status, "100 are the most" in found["detail"]) == (400, True)


def test_the_description_is_true_about_bodies_and_refusals(served: Served) -> None:
    found = served.call("/openapi.json", key="")[1]
    content = found["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/x-protobuf", "application/json"}
    assert found["paths"]["/api/v1/get_info"]["post"]["responses"].keys() == {"200", "4XX"}
    for path, methods in found["paths"].items():
        for operation in methods.values():
            named = operation["responses"]["200"]
            assert named, path
            if path.startswith(("/api/", "/v1/")) and "healthz" not in path:
                assert operation["security"], path


# ---- slow clients ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_hundred_slow_clients_do_not_stop_a_fast_one(served: Served, theirs: dict[str, str]) -> None:
    """Heads and bodies that do not end, idle lines, answers nobody reads, and long polls: all open until the end."""
    never = {"model_id": theirs["model"], "seq_id": 1000, "adam_params": {}}  # waits for what comes before
    waiting = json.dumps(served.call("/api/v1/optim_step", never)[1]).encode()
    large = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 20
    beginnings = [
        (HEAD % "telemetry").encode()[:-20],
        f"{HEAD % 'telemetry'}Content-Length: 1000\r\n\r\n{{".encode(),
        f"{HEAD % 'telemetry'}Transfer-Encoding: chunked\r\n\r\n5\r\n{{".encode(),
        b"",
        large,
        f"{HEAD % 'retrieve_future'}Content-Length: {len(waiting)}\r\n\r\n".encode() + waiting,
    ]
    lines = [_line(served) for _ in range(200)]
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.2):
            for number, line in enumerate(lines):
                if number % len(beginnings) in (0, 1):
                    line.sendall(b"x")

    try:
        for number, line in enumerate(lines):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.setblocking(number % len(beginnings) != 4)
            with suppress(BlockingIOError):  # it takes in no more: its answers are not read
                line.sendall(beginnings[number % len(beginnings)])
            line.settimeout(60)
        slow = threading.Thread(target=trickle)
        slow.start()
        begin = {"session_id": theirs["session"], "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}}
        model = served.call("/api/v1/create_model", begin)[1]["model_id"]
        for _ in range(10):
            sent = served.call("/api/v1/optim_step", {"model_id": model, "adam_params": {}})[1]
            assert "metrics" in served.result(sent)
            found = served.call("/v1/completions", {"model": "tiny", "prompt": "ab", "max_tokens": 4})
            assert (found[0], len(found[1]["choices"])) == (200, 1)
            assert served.call("/metrics")[0] == 200
        over.set()
        slow.join()
        begun = [line for number, line in enumerate(lines) if number % len(beginnings) < 4]
        assert not select.select(begun, [], [], 0)[0]  # every one of them is still being waited for
    finally:
        over.set()
        for line in lines:
            line.close()
    deadline_s = time.monotonic() + 60
    while len(psutil.Process(served._pid).net_connections("tcp")) > 20:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
