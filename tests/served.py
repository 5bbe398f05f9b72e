"""A training service in a process of its own, for tests: started, killed, started again at the same place."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import free_port

KEY = "tml-a-key-for-tests"
START_S = 60.0


class Served:
    """`etude serve` on a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder.parent / f"{folder.name}.log"

    def start(self) -> Served:
        """Start it, and return when it answers."""
        command = [sys.executable, "-m", "etude", "serve", "--folder", str(self.folder), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=5):
                    return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self._process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline_s, self.log.read_text()[-3000:]
                time.sleep(0.05)

    def kill(self) -> None:
        """End it without a warning."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> int:
        """Ask it to end, and return how it did."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(30)
        finally:
            self._process.kill()

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, key: str = KEY, **headers: str
    ) -> tuple[int, Any]:
        """Return the status and the content of an answer; a body of bytes is sent as it is, others as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"X-API-Key": key, "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{self.url}{path}", data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, content = error.code, error.read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content


@contextmanager
def connected(served: Served, key: str = KEY) -> Iterator[Any]:
    """Context with the official client of a service; what it leaves open at its end is closed without complaint."""
    import tinker

    os.environ["TINKER_TELEMETRY"] = "0"
    client = tinker.ServiceClient(base_url=served.url, api_key=key)
    try:
        yield client
    finally:
        client.close("success").result()
        del client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
