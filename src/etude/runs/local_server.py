"""A server of pages for this machine alone: text with a hash, files by the byte, and nothing to other hosts' names."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etude.errors import ConfigError, EtudeError

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True)
class Resource:
    """What an address leads to."""

    content: bytes | Path
    """What is sent; a file is read as far as it is asked for."""
    kind: str = "text/html; charset=utf-8"

    @classmethod
    def text(cls, page: str) -> Resource:
        """Return a page."""
        return cls(page.encode())


Find = Callable[[str], Resource | None]
"""Returns what an address, without its query, leads to; None if it leads nowhere."""


def make_local_server(find: Find, port: int, *, index: str) -> ThreadingHTTPServer:
    """Return a server on this machine that has its port; `serve_forever` answers.

    Args:
        find: Returns what is at an address.
        port: 0 takes a free one.
        index: What is at `/`, for whoever asks for something else.
    """

    class PageHandler(_LocalHandler):
        """Answers with what is found."""

        finder, index_text = staticmethod(find), index

    try:
        server = _LocalServer((HOST, port), PageHandler)
    except OSError as error:
        raise ConfigError(f"--port {port} cannot be used: {error.strerror}; --port 0 takes a free one") from None
    server.daemon_threads = True
    return server


class _LocalServer(ThreadingHTTPServer):
    """Says nothing about a browser that leaves before it has its answer: one that loads a page anew does."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _LocalHandler(BaseHTTPRequestHandler):
    """Answers only to those who ask for this machine by its own name."""

    finder: Find
    index_text: str

    def do_GET(self) -> None:
        try:
            host, address = urlsplit(f"//{self.headers.get('Host', '')}").hostname, urlsplit(self.path).path
        except ValueError:  # a bracket that nothing closes
            host, address = None, ""
        if host not in (HOST, "localhost"):  # a page elsewhere whose name was made to mean this machine
            self._say(403, "this server answers to 127.0.0.1 and localhost alone")
            return
        if address == "/favicon.ico":  # browsers ask for it unasked, and complain where there is none
            self._head(204, "image/x-icon", 0)
            return
        try:
            found = self.finder(address)
        except EtudeError as error:
            self._say(500, str(error))
            return
        if found is None:
            self._say(404, f"there is no such page; / shows {self.index_text}")
        elif isinstance(found.content, Path):
            self._send_file(found, found.content)
        else:
            self._send_page(found, found.content)

    def _say(self, code: int, text: str) -> None:
        self._head(code, "text/plain; charset=utf-8", len(text.encode()))
        self.wfile.write(text.encode())

    def _send_page(self, found: Resource, content: bytes) -> None:
        mark = f'"{hashlib.sha256(content).hexdigest()}"'
        is_known = self.headers.get("If-None-Match") == mark
        self._head(304 if is_known else 200, found.kind, 0 if is_known else len(content), ETag=mark)
        if not is_known:
            self.wfile.write(content)

    def _send_file(self, found: Resource, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                wanted = self._wanted_bytes(size)
                if wanted is None:
                    self._head(416, found.kind, 0, Content_Range=f"bytes */{size}")
                    return
                first, last = wanted
                is_part = "Range" in self.headers
                said = {"Content_Range": f"bytes {first}-{last}/{size}"} if is_part else {}
                self._head(206 if is_part else 200, found.kind, last - first + 1, Accept_Ranges="bytes", **said)
                file.seek(first)
                left = last - first + 1
                while left and (piece := file.read(min(left, _PIECE_BYTES))):
                    self.wfile.write(piece)
                    left -= len(piece)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # a player that jumps ahead leaves what it had asked for
        except FileNotFoundError:
            self._say(404, "the file is missing")

    def _wanted_bytes(self, size: int) -> tuple[int, int] | None:
        """Return the first and the last byte to send; None if there are none such."""
        header = self.headers.get("Range")
        if header is None:
            return 0, size - 1
        found = _RANGE.fullmatch(header.strip())
        if found is None or found.group(1) == found.group(2) == "":
            return None
        begin, end = found.groups()
        first = int(begin) if begin else max(0, size - int(end))
        last = min(int(end), size - 1) if begin and end else size - 1
        return (first, last) if first <= last else None

    def _head(self, code: int, kind: str, length: int, **more: str) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind, "Content-Length": str(length), "Cache-Control": "no-cache",
            "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            **{name.replace("_", "-"): value for name, value in more.items()},
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about each request."""
