"""Connections of which nothing comes are cut; those that move are not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

from etude.service.server.lines import Line  # noqa: E402 - needs uvicorn

LARGE = 32 << 20
_WAITS = threading.Event()


class Quick(Line):
    """Lines that lose patience soon."""

    silent_s = 0.4


class Strict(Line):
    """Lines whose answers are to be read, and of which there are few."""

    stuck_s, most = 1.5, 4


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    if scope["path"] == "/wait":
        _WAITS.set()
        await asyncio.sleep(1.5)
    body = bytes(LARGE) if scope["path"] == "/large" else b"x"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def _serving(kind: type[Line] = Quick, loop: str = "auto") -> Iterator[int]:
    config = uvicorn.Config(
        _app, http=kind, loop=loop, ws="none", port=0, log_config=None, lifespan="off", timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def _is_cut(line: socket.socket) -> bool:
    """Wait until the other side hangs up; tell whether it did."""
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def test_a_line_that_asks_for_nothing_is_cut() -> None:
    with _serving() as port, _connect(port) as silent, _connect(port) as slow, _connect(port) as again:
        slow.sendall(b"GET / HTTP/1.1\r\nHo")
        again.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n")
        assert _is_cut(silent)
        assert _is_cut(slow)
        assert _is_cut(again)


def test_a_line_whose_answer_takes_long_is_kept() -> None:
    with _serving() as port, _connect(port) as line:
        line.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_reads_is_given_up_and_one_that_is_read_slowly_is_not() -> None:
    ask = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with _serving(Strict) as port, _connect(port) as stuck, _connect(port) as slow:
        stuck.sendall(ask)
        slow.sendall(ask)
        size = 0
        while piece := slow.recv(1 << 18):  # for longer than a line may be stuck: 2 s
            size += len(piece)
            time.sleep(2.0 * len(piece) / LARGE)
        assert size > LARGE
        found = 0
        try:
            while piece := stuck.recv(1 << 20):
                found += len(piece)
        except ConnectionResetError:
            pass
        assert found < LARGE


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_too_many_lines_cut_the_one_that_has_asked_for_nothing_the_longest(loop: str) -> None:
    pytest.importorskip(loop)
    _WAITS.clear()
    with _serving(Strict, loop) as port, ExitStack() as lines:
        asking = lines.enter_context(_connect(port))
        asking.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        assert _WAITS.wait(20)
        idle = [lines.enter_context(_connect(port)) for _ in range(8)]
        idle[-1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[-1].recv(100).startswith(b"HTTP/1.1 200")
        assert all(_is_cut(line) for line in idle[:5])
        assert asking.recv(100).startswith(b"HTTP/1.1 200")
        for line in idle[5:7]:
            line.settimeout(0.2)
            assert not _is_cut(line)
