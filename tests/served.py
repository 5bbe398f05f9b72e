"""Servers for tests: pages in a thread, and a training service that is started, killed, started again at its place."""

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
from http.client import HTTPConnection
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

from etude.runs.durable import process_alive
from tests.faulty import FaultyLine
from tests.processes import free_port

KEY = "tml-a-key-for-tests"
START_S = 240.0
RUNNING = "ETUDE_TEST_SERVED"
"""Names the address of a service that another process has started."""


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

    @classmethod
    def running(cls, url: str) -> Served:
        """Return one that another process has started, and will end."""
        found = cls(Path("elsewhere"))
        found.url, found.port = url, int(url.rpartition(":")[2])
        return found

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

    def result(self, sent: Any, key: str = KEY) -> Any:
        """Return what a request came to, however long that takes on a machine with much to do."""
        for _ in range(20):
            status, found = self.call("/api/v1/retrieve_future", {"request_id": sent["request_id"]}, key=key)
            if status != 408:
                break
        assert status == 200, found
        return found


class ServedPages:
    """A server of pages in a thread, and what it answers."""

    def __init__(self, server: HTTPServer) -> None:
        self.server, self.port = server, int(server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = Thread(target=lambda: server.serve_forever(poll_interval=0.01))

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, content and headers of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        found = answer.status, answer.read(), dict(answer.getheaders())
        connection.close()
        return found

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join(timeout=60)
        self.server.server_close()


@contextmanager
def connected(served: Served | FaultyLine, key: str = KEY) -> Iterator[Any]:
    """Context with the official client of a service; what it leaves open at its end is closed without complaint."""
    import tinker

    os.environ["TINKER_TELEMETRY"] = "0"
    client = tinker.ServiceClient(base_url=served.url, api_key=key)
    try:
        yield client
    finally:
        if hasattr(client, "close"):  # older ones have none
            client.close("success").result()
        else:
            client.holder.close()
        del client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
