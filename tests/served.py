"""A training service in a process of its own, for tests: started, killed, started again at the same place."""

from __future__ import annotations

import gc
import json
import os
import signal
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

from etude.runs.durable import process_alive
from tests.faulty import FaultyLine
from tests.processes import free_port

KEY = "tml-a-key-for-tests"
START_S = 60.0


class Preloaded:
    """A process that has imported everything and forks into services: each then starts in no time."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from tests.served import fork_services; fork_services()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
        )

    def fork(self, arguments: list[str], log: Path) -> int:
        """Start `etude` with arguments; return the id of its process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([arguments, str(log)]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process; its services are ended by who started them."""
        self._process.communicate(timeout=30)


def fork_services() -> None:
    """Fork a service for every line of standard input; runs in a process of its own."""
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import etude.service.server.app  # noqa: F401
    from etude.cli.main import main

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        arguments, log = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.close(0)
        sys.argv = ["etude", *arguments]
        main()
        os._exit(0)


class Served:
    """`etude serve` on a folder."""

    def __init__(self, folder: Path, *options: str, preloaded: Preloaded | None = None) -> None:
        self._preloaded, self._pid = preloaded, 0
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder.parent / f"{folder.name}.log"

    def start(self) -> Served:
        """Start it, and return when it answers."""
        arguments = ["serve", "--folder", str(self.folder), "--port", str(self.port), *self._options]
        if self._preloaded is not None:
            self._pid = self._preloaded.fork(arguments, self.log)
        else:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen([sys.executable, "-m", "etude", *arguments], stdout=log, stderr=log)
            self._pid = self._process.pid
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=5):
                    return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self._is_alive(), self.log.read_text()[-3000:]
                assert time.monotonic() < deadline_s, self.log.read_text()[-3000:]
                time.sleep(0.05)

    def _is_alive(self) -> bool:
        return process_alive(self._pid) if self._process is None else self._process.poll() is None

    def _end(self, number: int) -> None:
        """Send a signal, and wait for the end."""
        if self._is_alive():
            os.kill(self._pid, number)
        deadline_s = time.monotonic() + START_S
        while self._is_alive():
            assert time.monotonic() < deadline_s, self.log.read_text()[-3000:]
            time.sleep(0.01)

    def kill(self) -> None:
        """End it without a warning."""
        self._end(signal.SIGKILL)

    def stop(self) -> int | None:
        """Ask it to end, and return how it did, if that is known."""
        self._end(signal.SIGTERM)
        return None if self._process is None else self._process.wait()

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
def connected(served: Served | FaultyLine, key: str = KEY) -> Iterator[Any]:
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
