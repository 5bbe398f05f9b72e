"""A bad line to a service, for tests: calls are lost, answers are lost, calls arrive twice, late or are turned away."""

from __future__ import annotations

import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("lost", "answer lost", "doubled", "delayed", "503", "429")
SAFE = ("/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/create_session")
"""Calls that the client makes once, without trying again."""


class FaultyLine:
    """Forwards HTTP to a service, a share of the calls badly: which is drawn from a seed, and the faults take turns."""

    def __init__(
        self, target: str, *, share: float, seed: int, plan: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Forward calls to an address.

        Args:
            target: The address.
            share: How many calls go wrong, of 1.
            seed: Decides which.
            plan: Faults of the first calls of a name, one after the other, whatever the share.
        """
        self.seen: Counter[str] = Counter()
        self.heard: list[tuple[str, str, str, bytes | None]] = []
        """Every call: its method, its path, the kind of its body, and that."""
        planned = {name: list(faults) for name, faults in (plan or {}).items()}
        line, generator, lock = self, random.Random(seed), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_call(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
                kind = self.headers.get("Content-Type", "")
                with lock:
                    line.heard.append((self.command, self.path, kind, body))
                    is_bad = self.path not in SAFE and generator.random() < share
                    fault = FAULTS[(line.seen.total() - line.seen[""]) % len(FAULTS)] if is_bad else ""  # all in turn
                    if left := planned.get(self.path.rpartition("/")[2]):
                        fault = left.pop(0)
                    line.seen[fault] += 1
                if fault == "delayed":
                    time.sleep(0.05)
                if fault == "lost":
                    self.close_connection = True
                    return
                if fault in ("503", "429"):
                    self._answer(int(fault), b'{"detail": "a fault"}', "application/json")
                    return
                for _ in range(2 if fault == "doubled" else 1):
                    found = _forward(target + self.path, self.command, body, dict(self.headers))
                if fault == "answer lost":
                    self.close_connection = True
                    return
                self._answer(*found)

            def _answer(self, status: int, content: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = handle_call

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        class Quiet(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

            def handle_error(self, *_: Any) -> None:
                """Say nothing of clients that hung up."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _forward(url: str, method: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes, str]:
    kept = {name: value for name, value in headers.items() if name.lower() not in ("host", "content-length")}
    request = urllib.request.Request(url, body, kept, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers.get("Content-Type", "application/json")
    except (urllib.error.URLError, OSError):
        return 503, b'{"detail": "nobody answers"}', "application/json"
